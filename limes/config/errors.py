"""What a user reads when settings are wrong: one line a setting with its value, its origin and what it takes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from limes.config.schema import describe, leaves, show, walk


def joined(problems: Iterable[str]) -> str:
    """One problem as it is, several under a heading, one line each."""
    lines = list(dict.fromkeys(problems))
    return lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} problems with the settings:", *lines])


def explain(error: ValidationError, origins: Mapping[str, str], *, rules: bool = True) -> list[str]:
    """The plain lines of a pydantic error; `origins` says where each setting's value came from.

    `rules` False leaves out what the rules between settings found.
    """
    lines: list[str] = []
    for detail in error.errors(include_url=False):
        if detail["loc"]:
            lines.append(_line(detail, origins))
        elif rules:
            lines.extend(str(detail["ctx"]["error"]).split("\n"))
    return lines


def _line(detail: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    location, value = detail["loc"], detail["input"]
    schema, path = walk(location)
    leaf = leaves().get(".".join(map(str, location[:2])))
    origin = f" ({origins[leaf.path]})" if leaf is not None and leaf.path in origins else ""
    if location[-1] == "[key]":
        return f"{path}{origin}: the key {show(value)} is not text"
    match detail["type"]:
        case "missing":
            return f"{walk(location[:-1])[1]}{origin} lacks {location[-1]}"
        case "extra_forbidden":
            near = difflib.get_close_matches(str(location[-1]), schema.get("properties", {}), n=1)
            return f"{path}.{location[-1]}{origin} is not a setting" + (f"; did you mean {near[0]}?" if near else "")
        case "value_error":
            return f"{path}{origin}: {detail['ctx']['error']}"
        case _:
            return f"{path} = {show(value)}{origin}: takes {describe(schema)}"
