"""Looking a setting up in a table of choices."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

Choice = TypeVar("Choice")


def choose(table: Mapping[str, Choice], name: str, setting: str) -> Choice:
    """The entry called `name`.

    Raises:
        ValueError: no such entry; the message names the setting, the nearest entry and all the others.
    """
    if name in table:
        return table[name]
    near = difflib.get_close_matches(str(name), table, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"{setting}={name!r}: {hint}choose one of {', '.join(table)}")
