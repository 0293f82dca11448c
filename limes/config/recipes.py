"""Recipes: TOML files that hold settings."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import limes

PATHS = (
    "model.path",
    "model.ref_path",
    "model.chat_template",
    "critic.path",
    "teacher.path",
    "data.prompt_data",
    "eval.prompt_data",
    "checkpoint.load",
)
"""Settings that may name a file or folder to read."""


def read_recipe(path: Path) -> Mapping[str, Any]:
    """The tables of a recipe.

    Raises:
        ValueError: the file is missing, unreadable or not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"recipe {path}: no such file{_instead(path)}") from None
    except OSError as error:
        raise ValueError(f"recipe {path}: {(error.strerror or str(error)).lower()}; give a TOML file") from error
    except ValueError as error:
        raise ValueError(f"recipe {path} is not valid TOML: {error}") from error


def known_recipes() -> list[Path]:
    """Recipes in the `recipes` folder here, or else in the one beside the installed package."""
    for folder in (Path("recipes"), Path(limes.__file__).parents[1] / "recipes"):
        found = sorted(folder.glob("*.toml"))
        if found:
            return found
    return []


def _instead(path: Path) -> str:
    candidates = {recipe.stem: recipe for recipe in [*known_recipes(), *sorted(path.parent.glob("*.toml"))]}
    near = difflib.get_close_matches(path.stem, candidates, n=1)
    if near:
        return f"; did you mean {candidates[near[0]]}?"
    return f"; recipes: {', '.join(map(str, candidates.values()))}" if candidates else ""


def located(value: Any, recipe: Path) -> Any:
    """A path in a recipe means the one beside the recipe when that exists; else it stays as written.

    `train.jsonl@[0:100]` is looked up without its row slice. What is found becomes an absolute path.
    """
    if not isinstance(value, str) or not value:
        return value
    name, at, rows = value.partition("@[")
    beside = os.path.abspath(recipe.parent / name)
    return f"{beside}{at}{rows}" if os.path.exists(beside) else value
