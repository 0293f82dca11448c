"""The scored steps that a grader, or the data, puts into a sample's metadata."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from limes.records import Sample
from limes.rewards.grade import plain_number

STEP_WISE = "step_wise"
"""Entry of `Sample.metadata`: `step_scores`, one a step; `step_token_spans`, first token of the response and one past
the last; and `step_indices`, by default 0, 1, 2 and so on."""


@dataclass(frozen=True, slots=True)
class SampleSteps:
    """The steps of one sample; see `STEP_WISE`. A score of None is none."""

    scores: list[float | None]
    indices: list[int]
    spans: list[tuple[int, int]]


def read_steps(sample: Sample) -> SampleSteps | None:
    """The scored steps of a sample; None where it knows of none.

    Raises:
        ValueError: an entry that lacks a list, whose lists differ in length, or which holds something else than
            numbers, spans inside the response and apart from each other, and whole numbers.
    """
    entry = sample.metadata.get(STEP_WISE)
    if entry is None:
        return None
    where = f"sample {sample.index}: metadata[{STEP_WISE!r}]"
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} is a {type(entry).__name__}, not a table of step_scores and step_token_spans")
    missing = [name for name in ("step_scores", "step_token_spans") if name not in entry]
    if missing:
        raise ValueError(f"{where} has no {' and no '.join(missing)}")
    lists = {name: entry[name] for name in ("step_scores", "step_indices", "step_token_spans") if name in entry}
    for name, values in lists.items():
        if isinstance(values, str | Mapping) or not hasattr(values, "__len__"):
            raise ValueError(f"{where}: {name} is a {type(values).__name__}, not a list")
    num = len(entry["step_scores"])
    indices, spans = entry.get("step_indices", range(num)), entry["step_token_spans"]
    if not num == len(indices) == len(spans):
        raise ValueError(
            f"{where} has {num} step_scores, {len(indices)} step_indices and {len(spans)} step_token_spans; give one "
            "of each a step"
        )
    return SampleSteps(
        [_score(score, where) for score in entry["step_scores"]],
        [_whole(index, f"{where}: a step index") for index in indices],
        _apart([_span(span, sample.response_length, where) for span in spans], where),
    )


def _score(score: Any, where: str) -> float | None:
    value = plain_number(score)
    if value is None:
        return None
    if not isinstance(value, numbers.Real) or math.isinf(value):
        raise ValueError(f"{where}: a step score must be a finite number or None, not {score!r}")
    return float(value)


def _whole(number: Any, what: str) -> int:
    value = plain_number(number)
    if not isinstance(value, numbers.Integral):
        raise ValueError(f"{what} must be a whole number, not {number!r}")
    return int(value)


def _span(span: Any, response_length: int, where: str) -> tuple[int, int]:
    if isinstance(span, str) or not hasattr(span, "__len__") or len(span) != 2:
        raise ValueError(f"{where}: a step's span is its first token and one past its last, not {span!r}")
    start, end = (_whole(bound, f"{where}: a bound of a step's span") for bound in span)
    if not 0 <= start < end <= response_length:
        raise ValueError(f"{where}: span {[start, end]} does not fit the {response_length} tokens of its sample")
    return start, end


def _apart(spans: list[tuple[int, int]], where: str) -> list[tuple[int, int]]:
    ordered = sorted(spans)
    for (first, end), (start, last) in pairwise(ordered):
        if start < end:
            raise ValueError(f"{where}: spans {[first, end]} and {[start, last]} overlap: no token is in two steps")
    return spans
