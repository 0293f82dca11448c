"""Dotted flags: `--rollout.batch_size 8`, `--rollout.batch-size=8`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from limes.config.schema import from_text, leaves, nearest, sections, unknown


@dataclass(slots=True)
class Arguments:
    """A command line in parts."""

    settings: list[tuple[str, Any]] = field(default_factory=list)
    """Dotted names and values in the order given."""

    options: dict[str, str] = field(default_factory=dict)
    """The command's own options, spelled with underscores; an option without a value holds an empty string."""

    positional: list[str] = field(default_factory=list)


def parse_arguments(words: Sequence[str], options: Mapping[str, bool] | None = None) -> Arguments:
    """Split a command line into settings, options and the rest.

    A flag with a dot sets a setting, one without is an option of the command: `options` says of each whether it takes
    a value. Dashes in names count as underscores, names are never abbreviated, and the word `--` ends the flags.

    Raises:
        ValueError: an unknown option, or a flag without its value.
    """
    options = options or {}
    arguments, rest = Arguments(), deque(words)
    while rest:
        word = rest.popleft()
        if word == "--":
            arguments.positional.extend(rest)
            break
        if not word.startswith("--"):
            arguments.positional.append(word)
        else:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if "." not in name and name not in options:
                raise ValueError(_no_such_option(name, options))
            text = value if equals else _next_value(rest) if options.get(name, True) else None
            if "." in name:
                arguments.settings.append((name, _setting(name, text)))
            else:
                arguments.options[name] = _option(name, text, options[name])
    return arguments


def _no_such_option(name: str, options: Iterable[str]) -> str:
    if name in sections():
        return unknown(name)
    near = [f"--{other if '.' in other else other.replace('_', '-')}" for other in nearest(name, options)]
    return f"--{name} is not a flag" + (f"; did you mean {' or '.join(near)}?" if near else "; see --help")


def _next_value(rest: deque[str]) -> str | None:
    """Take the word that follows a flag, unless it is a flag itself."""
    return rest.popleft() if rest and not rest[0].startswith("--") else None


def _setting(name: str, text: str | None) -> Any:
    leaf = leaves().get(name)
    if text is not None:
        return from_text(name, text)
    if leaf is not None and leaf.accepts != "true or false":
        raise ValueError(f"--{name} needs a value: {leaf.accepts}; write --{name}=VALUE when it starts with --")
    return True


def _option(name: str, text: str | None, takes_value: bool) -> str:
    flag = "--" + name.replace("_", "-")
    if takes_value and not text:
        raise ValueError(f"{flag} needs a value")
    if not takes_value and text:
        raise ValueError(f'{flag} takes no value, got "{text}"')
    return text or ""
