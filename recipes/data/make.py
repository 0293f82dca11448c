"""Writes the data sets of the recipes beside this file. Running it again gives the same bytes.

python recipes/data/make.py
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
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


def sums_step_by_step(num_rows: int = 240, seed: int = 0) -> Iterator[list[dict[str, str]]]:
    """Conversations of two turns: a sum, and one more number added to it; no conversation twice."""
    generator, seen = random.Random(seed), set[tuple[int, ...]]()
    while len(seen) < num_rows:
        a, b, c = numbers = tuple(generator.randint(1, 9) for _ in range(3))
        if numbers in seen:
            continue
        seen.add(numbers)
        yield [
            {"role": "user", "content": f"What is {a} + {b}?"},
            {"role": "assistant", "content": f"{a} + {b} = {a + b}"},
            {"role": "user", "content": f"Add {c} to that."},
            {"role": "assistant", "content": f"{a + b} + {c} = {a + b + c}"},
        ]


def write(name: str, rows: Iterable[object]) -> None:
    """One JSON object a line."""
    lines = [json.dumps(row) + "\n" for row in rows]
    (HERE / name).write_text("".join(lines), encoding="utf-8")


def labelled(rows: Iterable[tuple[str, str]]) -> Iterator[dict[str, str]]:
    """Prompts with the answer that the grader compares with."""
    return ({"prompt": prompt, "label": label} for prompt, label in rows)


if __name__ == "__main__":
    write("addition.jsonl", labelled(addition()))
    write("largest_number.jsonl", labelled(largest_number()))
    write("sums.jsonl", ({"messages": messages} for messages in sums_step_by_step()))
