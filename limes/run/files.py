"""Files that are whole or absent, and JSON lines that give back what went in."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

NON_FINITE = "$float"
NOT_JSON = "$repr"
MAX_DEPTH = 100


@contextmanager
def atomic_file(path: Path, *, durable: bool = False) -> Iterator[TextIO]:
    """Open a text file that takes the place of `path` only when the block ends well.

    A process killed at any instant leaves the old file or the new one, never half of one. `durable` also waits for
    the disk, which matters when the machine itself may go down.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def to_json(value: Any) -> str:
    """One line of strict JSON.

    Floats come back exactly. NaN and infinities are written as `{"$float": "nan" | "inf" | "-inf"}`, NumPy scalars and
    arrays as numbers and lists, tuples as lists, keys as strings. What JSON cannot hold at all becomes
    `{"$repr": "..."}`, so that an odd label or metadata value never costs the file.
    """
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError):
        return json.dumps(_plain(value), allow_nan=False, separators=(",", ":"))


def from_json(text: str) -> Any:
    """Read what `to_json` wrote."""
    return json.loads(text, object_hook=_revive)


def _plain(value: Any, depth: int = 0) -> Any:
    """The value rebuilt from what strict JSON has."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {NON_FINITE: repr(float(value))}
    if depth < MAX_DEPTH:
        if isinstance(value, Mapping):
            return {str(key): _plain(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [_plain(item, depth + 1) for item in value]
        if hasattr(value, "tolist"):
            return _plain(value.tolist(), depth + 1)
    return {NOT_JSON: repr(value)}


def _revive(item: dict[str, Any]) -> Any:
    if len(item) == 1 and item.get(NON_FINITE) in ("nan", "inf", "-inf"):
        return float(item[NON_FINITE])
    return item
