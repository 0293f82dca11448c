"""From settings to a grader."""

from __future__ import annotations

import difflib
import functools
import inspect
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import (
    ConfigDict,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    create_model,
)

from limes.config.reward import RewardConfig
from limes.rewards.choice import choice
from limes.rewards.combine import Term, WeightedSum
from limes.rewards.function import FunctionGrader, check_call, import_function
from limes.rewards.grade import Grader, TextGrader
from limes.rewards.gym import Extract, GymGrader
from limes.rewards.maths import DEFAULT_LIMIT_S, MathGrader
from limes.rewards.regex import RegexGrader
from limes.rewards.remote import RemoteGrader
from limes.rewards.simple import exact, f1, last_integer


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the settings a grader is described: at `reward`, or at `reward.terms[0]` and so on."""

    config: RewardConfig
    path: str

    @property
    def key(self) -> str | None:
        """The entry that a dict reward must have; in a weighted sum it is always `score`."""
        return None if self.config.terms else self.config.key


def build_grader(config: RewardConfig) -> Grader:
    """The grader that the settings describe. Processes and connections start with the first sample.

    Raises:
        ValueError: an unknown kind or option, a missing option or one of the wrong type, or a function that cannot be
            imported or called; the message names the setting and what to do.
    """
    if config.terms:
        return _weighted_sum(config)
    if config.group and ":" not in config.kind:
        raise ValueError(
            f"reward.group = true needs a module:function grader, not reward.kind = {config.kind!r}; set it to false"
        )
    return _build_one(Place(config, "reward"), config.kind, config.options)


def _weighted_sum(config: RewardConfig) -> Grader:
    kinds = [term.kind for term in config.terms]
    if config.group and not any(":" in kind for kind in kinds):
        raise ValueError(
            f"reward.group = true needs a module:function among the terms {', '.join(kinds)}; set it to false"
        )
    names = term_names(kinds)
    if config.key is not None and config.key not in ("score", *names):
        raise ValueError(
            f"reward.key = {config.key!r} is no part of the weighted sum; {_closest(config.key, ['score', *names])}"
        )
    terms = []
    for number, (name, term) in enumerate(zip(names, config.terms, strict=True)):
        place = Place(config, f"reward.terms[{number}]")
        terms.append(Term(name, term.weight, _build_one(place, term.kind, term.options)))
    return WeightedSum(terms)


def term_names(kinds: Sequence[str]) -> list[str]:
    """What the parts of a weighted sum are called: their kinds, numbered from the second of a kind on."""
    seen: Counter[str] = Counter()
    names = []
    for kind in kinds:
        seen[kind] += 1
        names.append(kind if seen[kind] == 1 else f"{kind}_{seen[kind]}")
    return names


def _build_one(place: Place, kind: str, options: Mapping[str, Any]) -> Grader:
    if ":" in kind:
        return _function(place, kind, options)
    if kind not in KINDS:
        hint = "a function of your own is written module:function" if "." in kind else _closest(kind, KINDS)
        raise ValueError(f"{place.path}.kind = {kind!r} is not a grader; {hint}")
    where = f"{place.path}.options"
    chosen = parse_options(KINDS[kind], options, kind, where)
    try:
        return KINDS[kind](place, **chosen)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def parse_options(factory: Callable[..., Grader], options: Mapping[str, Any], kind: str, where: str) -> dict[str, Any]:
    """Check options against the keyword arguments of a factory.

    Raises:
        ValueError: one is unknown, missing or of the wrong type.
    """
    parameters = [p for p in inspect.signature(factory).parameters.values() if p.kind is p.KEYWORD_ONLY]
    names = [parameter.name for parameter in parameters]
    for name in options:
        if name not in names:
            raise ValueError(f"{where}.{name} is no option of {kind!r}; {_closest(name, names)}")
    hints = typing.get_type_hints(factory, include_extras=True)
    fields: dict[str, Any] = {
        p.name: (hints[p.name], ... if p.default is inspect.Parameter.empty else p.default) for p in parameters
    }
    model = create_model("Options", __config__=ConfigDict(extra="forbid"), **fields)
    try:
        checked = model(**options)
    except ValidationError as error:
        problems = [
            f"{where}.{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
            + (f" (now {problem['input']!r})" if problem["type"] != "missing" else "")
            for problem in error.errors(include_url=False)
        ]
        raise ValueError(f"{kind!r}: {'; '.join(problems)}") from error
    return {name: getattr(checked, name) for name in names}


def _closest(name: str, names: Iterable[str]) -> str:
    """The end of a message about a wrong name."""
    names = list(names)
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"there are {', '.join(names)}" if names else "it takes none"


def _function(place: Place, kind: str, options: Mapping[str, Any]) -> Grader:
    setting = f"{place.path}.kind"
    function = import_function(kind, setting)
    check_call(function, options, f'{setting} = "{kind}"', f"{place.path}.options")
    config = place.config
    return FunctionGrader(
        function, name=kind, options=options, group=config.group, key=place.key, timeout_s=config.timeout_s
    )


def _math(place: Place, *, timeout_s: PositiveFloat = DEFAULT_LIMIT_S) -> Grader:
    return MathGrader(timeout_s=timeout_s, num_workers=place.config.num_workers)


def _exact(place: Place, *, ignore_case: bool = False) -> Grader:
    return TextGrader(functools.partial(exact, ignore_case=ignore_case))


def _f1(place: Place) -> Grader:
    return TextGrader(f1)


def _last_integer(place: Place) -> Grader:
    return TextGrader(last_integer)


def _choice(place: Place, *, letters: str = "ABCDEFGHIJ") -> Grader:
    return TextGrader(functools.partial(choice, letters=letters))


def _regex(place: Place, *, pattern: str) -> Grader:
    return RegexGrader(pattern=pattern, timeout_s=place.config.timeout_s, num_workers=place.config.num_workers)


def _reasoning_gym(place: Place, *, binarise: bool = True, extract: Extract = "auto") -> Grader:
    config = place.config
    return GymGrader(binarise=binarise, extract=extract, timeout_s=config.timeout_s, num_workers=config.num_workers)


def _remote(
    place: Place,
    *,
    url: str,
    try_timeout_s: PositiveFloat | None = None,
    retries: NonNegativeInt = 3,
    backoff_s: NonNegativeFloat = 0.2,
    headers: dict[str, str] | None = None,
    max_connections: PositiveInt = 64,
) -> Grader:
    return RemoteGrader(
        url,
        key=place.key,
        timeout_s=place.config.timeout_s,
        try_timeout_s=try_timeout_s,
        retries=retries,
        backoff_s=backoff_s,
        headers=headers,
        max_connections=max_connections,
    )


KINDS: dict[str, Callable[..., Grader]] = {
    "math": _math,
    "exact": _exact,
    "regex": _regex,
    "choice": _choice,
    "f1": _f1,
    "last_integer": _last_integer,
    "reasoning_gym": _reasoning_gym,
    "remote": _remote,
}
