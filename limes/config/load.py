"""Settings from a recipe, flags or plain Python: one way in, one object out, and a record of where values came from."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from limes.config.derived import AT_START, FOLLOWS, value_of
from limes.config.errors import explain, joined
from limes.config.flags import parse_arguments
from limes.config.recipes import PATHS, located, read_recipe
from limes.config.root import Config
from limes.config.schema import leaves, sections, unknown

DEFAULT, RECIPE, FLAG, PYTHON, DERIVED = "default", "recipe file", "command line", "python", "derived"


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings with where each value came from."""

    config: Config
    origins: dict[str, str]
    """Dotted name -> `default`, `recipe file`, `command line`, `python`, or `derived` (from other settings, the model
    or the data while unset)."""

    recipe: Path | None = None


def load_config(
    path: str | os.PathLike[str] | None = None, overrides: Mapping[str, Any] | Sequence[str] = ()
) -> Config:
    """The settings of a recipe with overrides on top.

    Args:
        path: a TOML recipe; None starts from the defaults.
        overrides: a mapping with nested or dotted names (`{"rollout.batch_size": 8}`), or flags as on a command line
            (`["--rollout.batch_size", "8"]`). Later ones win.

    Raises:
        ValueError: unknown names, wrong types, or settings that do not go together; all that was found, one a line.
    """
    return resolve(path, overrides).config


def resolve(path: str | os.PathLike[str] | None = None, overrides: Mapping[str, Any] | Sequence[str] = ()) -> Resolved:
    """Like `load_config`, and says where each value came from."""
    recipe = None if path is None else Path(path)
    if isinstance(overrides, Mapping):
        return resolve_pairs(recipe, flatten(overrides), PYTHON)
    arguments = parse_arguments(overrides)
    if arguments.positional:
        raise ValueError(f'"{arguments.positional[0]}" belongs to no flag; write --section.name VALUE')
    return resolve_pairs(recipe, arguments.settings, FLAG)


def resolve_pairs(recipe: Path | None, pairs: Iterable[tuple[str, Any]], origin: str) -> Resolved:
    """Settings of a recipe with dotted names and values on top, later ones winning; `origin` says whose they are."""
    tree: dict[str, dict[str, Any]] = {}
    origins = dict.fromkeys(leaves(), DEFAULT)
    strangers: list[str] = []
    given = [(RECIPE, *pair) for pair in _from_recipe(recipe)] + [(origin, *pair) for pair in pairs]
    for source, name, value in given:
        leaf_path = _place(tree, name, value)
        if leaf_path is None:
            strangers.append(f"{unknown(name)} ({source})")
        else:
            origins[leaf_path] = source
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        # A misspelled setting is likely what a rule between settings misses: the rules wait until names are right.
        raise ValueError(joined([*strangers, *explain(error, origins, rules=not strangers)])) from None
    if strangers:
        raise ValueError(joined(strangers))
    return Resolved(config, _with_derived(config, origins), recipe)


def _from_recipe(recipe: Path | None) -> Iterator[tuple[str, Any]]:
    if recipe is not None:
        for name, value in flatten(read_recipe(recipe)):
            yield name, located(value, recipe) if name in PATHS else value


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and plain values of a nested mapping; free-form tables stay whole."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name not in leaves() and (value or name in sections()):
            yield from flatten(value, f"{name}.")
        else:
            yield name, _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _place(tree: dict[str, dict[str, Any]], name: str, value: Any) -> str | None:
    """Put one value in its place; returns the setting's dotted name, or None when there is no such setting."""
    section, _, rest = name.partition(".")
    leaf_name, *entry = rest.split(".")
    leaf = leaves().get(f"{section}.{leaf_name}")
    if leaf is None or (entry and not leaf.is_table):
        return None
    table = tree.setdefault(section, {})
    if not entry:
        table[leaf_name] = None if value == "none" and leaf.may_be_none else value
        return leaf.path
    for key in [leaf_name, *entry[:-1]]:
        inner = table.get(key)
        table[key] = dict(inner) if isinstance(inner, dict) else {}
        table = table[key]
    table[entry[-1]] = value
    return leaf.path


def _with_derived(config: Config, origins: dict[str, str]) -> dict[str, str]:
    derived = (path for path in [*FOLLOWS, *AT_START] if value_of(config, path) is None)
    return origins | dict.fromkeys(derived, DERIVED)
