"""Writes the data sets of the recipes beside this file. Running it again gives the same bytes.

python recipes/data/make.py
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent


def addition() -> Iterator[tuple[str, str]]:
    """All sums of two numbers from 1 to 9."""
    for a in range(1, 10):
        for b in range(1, 10):
            yield f"What is {a} + {b}? Answer with just the number.", str(a + b)


def largest_number(num_rows: int = 500, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Four distinct numbers from 1 to 99; no row twice."""
    generator, seen = random.Random(seed), set[tuple[int, ...]]()
    while len(seen) < num_rows:
        numbers = tuple(generator.sample(range(1, 100), 4))
        if numbers in seen:
            continue
        seen.add(numbers)
        listed = ", ".join(map(str, numbers))
        yield f"Which is the largest number: {listed}? Answer with just the number.", str(max(numbers))


def write(name: str, rows: Iterator[tuple[str, str]]) -> None:
    """One JSON object a line."""
    lines = [json.dumps({"prompt": prompt, "label": label}) + "\n" for prompt, label in rows]
    (HERE / name).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write("addition.jsonl", addition())
    write("largest_number.jsonl", largest_number())
