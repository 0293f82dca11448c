"""Settings as text: TOML, help and the table of `--dry-run`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

import tomli_w

from limes.config.batch import BatchAlgebra
from limes.config.derived import AT_START, FOLLOWS, effective
from limes.config.load import Resolved
from limes.config.root import Config
from limes.config.schema import leaves, sections, show


def to_toml(config: Config) -> str:
    """All settings as a recipe; `load_config` of it gives an equal object.

    TOML knows no null: an unset setting is left out, or is `"none"` where leaving it out would bring its default back.
    """
    tables: dict[str, dict[str, Any]] = {}
    for section, values in config.model_dump().items():
        defaults = {name: leaves()[f"{section}.{name}"].default for name in values}
        kept = {
            name: "none" if value is None else value
            for name, value in values.items()
            if not value is defaults[name] is None
        }
        tables[section] = kept
    return tomli_w.dumps(tables)


def settings_help(names: Iterable[str], width: int) -> str:
    """Every setting of the named sections: flag, default, meaning and accepted values."""
    lines: list[str] = []
    for name in names:
        lines += ["", f"[{name}] {_one_line(sections()[name].__doc__)}"]
        for leaf in leaves().values():
            if leaf.path.startswith(f"{name}."):
                follows = FOLLOWS.get(leaf.path) or AT_START.get(leaf.path)
                default = follows if leaf.default is None and follows else show(leaf.default)
                lines.append(f"  --{leaf.path}  (default: {default})")
                entries = f"; one entry: --{leaf.path}.NAME VALUE" if leaf.is_table else ""
                lines += _paragraph(f"{leaf.doc} Takes {leaf.accepts}{entries}.", width)
    return "\n".join(lines)


def _paragraph(text: str, width: int) -> list[str]:
    indent = " " * 6
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def settings_table(resolved: Resolved) -> str:
    """Every setting with its value and where that came from."""
    rows = []
    for path in leaves():
        value, origin = show(effective(resolved.config, path)), resolved.origins.get(path, "")
        if origin == "derived":
            origin = f"derived: {FOLLOWS.get(path) or AT_START[path]}"
            value = value if path in FOLLOWS else "at start"
        rows.append((path, value, origin))
    return aligned(rows)


def batch_table(algebra: BatchAlgebra) -> str:
    """The batch algebra, one count a line."""
    return aligned(algebra.rows())


def aligned(rows: Iterable[tuple[str, str, str]]) -> str:
    """Three columns; a value longer than 40 characters pushes only its own line."""
    rows = list(rows)
    first = max(len(row[0]) for row in rows)
    second = min(40, max(len(row[1]) for row in rows))
    return "\n".join(f"{name:<{first}}  {value:<{second}}  {remark}".rstrip() for name, value, remark in rows)
