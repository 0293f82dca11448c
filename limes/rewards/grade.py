"""What a grader is and what counts as a reward."""

from __future__ import annotations

import asyncio
import functools
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from limes.records import Reward, Sample

MAX_ERROR_CHARS = 500
LARGEST = 3.4e38
"""Of a reward, in size: about the largest float32, in which advantages are."""


class GraderError(RuntimeError):
    """A grader could not do its work; says nothing about the answer."""


class TimedOut(GraderError):
    """A grader did not answer within its limit."""


@dataclass(frozen=True, slots=True)
class Grade:
    """The outcome for one sample.

    `reward` is None when the sample is unscored: the grader chose so, or it failed. Only a failure has an `error`,
    which reads `Cause: details`; a wrong answer has none.
    """

    reward: Reward
    error: str | None = None


class Grader(Protocol):
    """Scores answers."""

    async def grade(self, samples: list[Sample]) -> list[Grade]:
        """One grade a sample, in order. Faults of the grader are in the grades, they are never raised."""

    async def close(self) -> None:
        """End processes and connections. A second call does nothing."""


def scalar_reward(reward: Reward, key: str | None = None) -> float | None:
    """The number that training uses.

    A float, int, bool, NumPy scalar or 0-d tensor is taken as it is; a dict gives its entry `key` (default `score`);
    None means unscored.

    Raises:
        ValueError: anything else, NaN and infinity included, or a dict without the entry. It is never turned into 0.
    """
    if isinstance(reward, Mapping):
        name = key or "score"
        if name not in reward:
            raise ValueError(
                f"the reward has no entry {name!r}, only {', '.join(map(repr, reward)) or 'none'}; set reward.key"
            )
        reward = reward[name]
    if reward is None:
        return None
    value = plain_number(reward)
    if not isinstance(value, numbers.Real):
        raise ValueError(f"a reward must be a number, a dict or None, not {type(value).__name__} {str(value)[:80]!r}")
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError("a reward must be a finite number, not an integer beyond the range of floats") from error
    if not math.isfinite(number):
        raise ValueError(f"a reward must be a finite number, not {number}")
    if abs(number) > LARGEST:
        raise ValueError(f"a reward must be at most {LARGEST:g} in size, not {number}")
    return number


def plain_number(value: Any) -> Any:
    """A NumPy scalar or 0-d tensor as a Python number; all else as it is."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value


def checked(reward: Reward, key: str | None) -> Grade:
    """The grade of a reward that a grader returned; dicts keep all their parts.

    Raises:
        ValueError: it is no reward, see `scalar_reward`.
    """
    number = scalar_reward(reward, key)
    if isinstance(reward, Mapping):
        return Grade({str(name): plain_number(part) for name, part in reward.items()})
    return Grade(number)


def failed(error: BaseException) -> Grade:
    """The grade of a sample whose grader failed."""
    return Grade(None, f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS])


async def attempt(score: Callable[[], Awaitable[Reward]], key: str | None) -> Grade:
    """Call a scorer; whatever it raises or returns becomes a grade."""
    try:
        return checked(await score(), key)
    except Exception as error:  # noqa: BLE001 (any fault of a grader is counted by its cause, in the grade)
        return failed(error)


class EachSample:
    """The common part of graders that score samples one by one, all of a call at the same time.

    Attributes:
        key: the entry that a dict reward must have; None: `score`.
    """

    def __init__(self, key: str | None = None) -> None:
        self.key = key

    async def score(self, sample: Sample) -> Reward:
        """The reward of one sample; may raise."""
        raise NotImplementedError

    async def grade(self, samples: list[Sample]) -> list[Grade]:
        """One grade a sample."""
        calls = (attempt(functools.partial(self.score, sample), self.key) for sample in samples)
        return list(await asyncio.gather(*calls))

    async def close(self) -> None:
        """Nothing to end."""


class TextGrader(EachSample):
    """Scores with a quick pure function of response and label."""

    def __init__(self, compare: Callable[[str, Any], float]) -> None:
        super().__init__()
        self._compare = compare

    async def score(self, sample: Sample) -> Reward:
        """What the function returns."""
        return self._compare(sample.response, sample.label)
