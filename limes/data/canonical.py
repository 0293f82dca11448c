"""One text for equal values, the same in every process: what fingerprints and comparisons are made of."""

from __future__ import annotations

import json
import re
from typing import Any

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def canonical(value: Any) -> str:
    """Write `value` as text that does not depend on the order of dicts and sets nor on memory addresses.

    Tuples count as lists and NumPy values as what they hold.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return json.dumps(value)
    if isinstance(value, dict):
        return "{" + ",".join(sorted(f"{canonical(key)}:{canonical(entry)}" for key, entry in value.items())) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, set | frozenset):
        return "<" + ",".join(sorted(map(canonical, value))) + ">"
    if hasattr(value, "tolist"):
        return canonical(value.tolist())
    return f"{type(value).__name__}:{json.dumps(ADDRESS.sub('', repr(value)))}"
