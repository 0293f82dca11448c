"""What settings there are: read off the section classes once, and put in words."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, cast, get_args

from pydantic import TypeAdapter

from limes.config.base import Section
from limes.config.root import Config
from limes.config.synonyms import SYNONYMS


@dataclass(frozen=True, slots=True)
class Leaf:
    """One setting."""

    path: str
    """Dotted name, such as `rollout.batch_size`."""

    type: Any
    """Its annotation with bounds, as pydantic reads it."""

    default: Any
    accepts: str
    """Values it takes, in words."""

    doc: str
    may_be_none: bool
    is_table: bool
    """A free-form table, whose entries can be set one by one."""


@cache
def sections() -> dict[str, type[Section]]:
    """Section classes by name, in order."""
    return {name: cast(type[Section], field.annotation) for name, field in Config.model_fields.items()}


@cache
def leaves() -> dict[str, Leaf]:
    """All settings by dotted name, in order."""
    return {leaf.path: leaf for name, section in sections().items() for leaf in _leaves_of(name, section)}


def _leaves_of(name: str, section: type[Section]) -> Iterable[Leaf]:
    for field_name, field in section.model_fields.items():
        schema, _ = walk((name, field_name))
        yield Leaf(
            path=f"{name}.{field_name}",
            type=Annotated[field.annotation, field],
            default=field.get_default(call_default_factory=True),
            accepts=describe(schema),
            doc=" ".join((field.description or "").split()),
            may_be_none=type(None) in get_args(field.annotation),
            is_table=schema.get("type") == "object",
        )


@cache
def _json_schema() -> dict[str, Any]:
    return Config.model_json_schema()


def _resolve(schema: dict[str, Any]) -> dict[str, Any]:
    return _json_schema()["$defs"][schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema


def walk(location: Iterable[str | int]) -> tuple[dict[str, Any], str]:
    """Follow a location into the settings as far as it leads; returns the JSON schema there and the dotted name."""
    schema, path = _json_schema(), ""
    for part in location:
        if isinstance(part, int) and "items" in schema:
            schema, path = _resolve(schema["items"]), f"{path}[{part}]"
        elif part in schema.get("properties", {}):
            schema, path = _resolve(schema["properties"][part]), f"{path}.{part}".lstrip(".")
        else:
            break
    return schema, path


def describe(schema: dict[str, Any]) -> str:
    """A JSON schema in plain words: `a whole number of 1 or more`."""
    schema = _resolve(schema)
    if "anyOf" in schema:
        return ", or ".join(describe(part) for part in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        *first, last = (f"`{choice}`" for choice in schema.get("enum") or [schema["const"]])
        return f"{', '.join(first)} or {last}" if first else last
    match schema.get("type"):
        case "integer":
            # Bounds in whole numbers read easier as the first number that is allowed.
            above = {"minimum": schema["exclusiveMinimum"] + 1} if "exclusiveMinimum" in schema else {}
            return "a whole number" + _bounds({**schema, **above, "exclusiveMinimum": None})
        case "number":
            return "a number" + _bounds(schema)
        case "array":
            return f"a list ({describe(schema['items'])} each)"
        case "object":
            names = ", ".join(schema.get("properties", {}))
            return f"a table of {names}" if names else "a table"
        case "string" if schema.get("minLength"):
            return "text that is not empty"
        case kind:
            return {"string": "text", "boolean": "true or false", "null": "none"}[str(kind)]


def _bounds(schema: dict[str, Any]) -> str:
    words = {
        "minimum": "of {:g} or more",
        "exclusiveMinimum": "above {:g}",
        "maximum": "up to {:g}",
        "exclusiveMaximum": "below {:g}",
    }
    found = [text.format(schema[key]) for key, text in words.items() if schema.get(key) is not None]
    return " " + " and ".join(found) if found else ""


def from_text(path: str, text: str) -> Any:
    """Read a value written on a command line: as the setting's own type, else as JSON, else as TOML, else as text."""
    leaf = leaves().get(path)
    if leaf is not None:
        try:
            return TypeAdapter(leaf.type).validate_python(text)
        except ValueError:
            pass  # Not that type as it stands; JSON or TOML may be, and what is wrong in the end is reported in full.
    return _json_or_toml(text)


def _json_or_toml(text: str) -> Any:
    import tomllib

    for read in (json.loads, lambda value: tomllib.loads(f"x = {value}")["x"]):
        try:
            return read(text)
        except (ValueError, RecursionError):
            continue
    return text


def show(value: Any) -> str:
    """A value in one short line, as a recipe writes it; unset is `none`."""
    if value is None:
        return "none"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 100 else f"{text[:97]}..."


def nearest(name: str, more: Iterable[str] = ()) -> list[str]:
    """Settings (and `more` names) that a misspelled name may stand for, best first; equally good ones together."""
    section, _, leaf = name.rpartition(".")
    if leaf in SYNONYMS:
        meant = SYNONYMS[leaf]
        beside = f"{section}.{meant.rpartition('.')[2]}"
        return [beside if beside in leaves() else meant]
    scores = {candidate: _likeness(name, candidate) for candidate in [*leaves(), *more]}
    best = max(scores.values())
    return [candidate for candidate, score in scores.items() if score == best][:3] if best >= 0.6 else []


def _likeness(name: str, candidate: str) -> float:
    """Between 0 and 1: how alike two dotted names are, mostly by their last word."""
    (section, _, leaf), (other_section, _, other_leaf) = name.rpartition("."), candidate.rpartition(".")
    words = difflib.SequenceMatcher(None, leaf, other_leaf).ratio()
    if len(leaf) > 2 and other_leaf.startswith(leaf):
        words = max(words, 0.8)
    same_section = difflib.SequenceMatcher(None, section, other_section).ratio()
    if same_section < 0.6:  # another section, not a misspelled one: letters in common mean nothing
        same_section = 0.0
    whole = difflib.SequenceMatcher(None, name.replace(".", "_"), candidate.replace(".", "_")).ratio()
    return max(0.9 * words + 0.1 * same_section, 0.95 * whole)


def unknown(name: str) -> str:
    """The sentence for a name that is no setting."""
    if name in sections():
        first = next(path for path in leaves() if path.startswith(f"{name}."))
        return f"{name} is a section, not a setting; write {first} and so on"
    near = nearest(name)
    return f"{name} is not a setting; " + (f"did you mean {' or '.join(near)}?" if near else "see limes train --help")
