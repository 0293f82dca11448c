"""Several graders as one: a weighted sum that keeps its parts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from limes.records import Sample
from limes.rewards.grade import Grade, Grader, scalar_reward


@dataclass(frozen=True, slots=True)
class Term:
    """A grader, its share in the sum, and what its part of the reward is called."""

    name: str
    weight: float
    grader: Grader


class WeightedSum:
    """The reward is a dict: `score` is the sum of weight times reward, the other entries are the terms' own rewards.

    A term that gives a dict counts with its `score`, and its other entries become `name.entry`. When any term leaves a
    sample unscored, by None or by a fault, the whole sample is unscored: a sum over fewer terms would be on another
    scale. After a fault the error names the term.
    """

    def __init__(self, terms: Sequence[Term]) -> None:
        self._terms = list(terms)

    async def grade(self, samples: list[Sample]) -> list[Grade]:
        """One grade a sample."""
        columns = await asyncio.gather(*(term.grader.grade(samples) for term in self._terms))
        return [self._sum(grades) for grades in zip(*columns, strict=True)]

    def _sum(self, grades: Sequence[Grade]) -> Grade:
        total, parts = 0.0, dict[str, Any]()
        for term, grade in zip(self._terms, grades, strict=True):
            if grade.error is not None:
                cause, _, details = grade.error.partition(": ")
                return Grade(None, f"{cause}: {term.name}: {details}")
            value = scalar_reward(grade.reward)
            if value is None:
                return Grade(None)
            total += term.weight * value
            parts[term.name] = value
            if isinstance(grade.reward, Mapping):
                parts |= {f"{term.name}.{entry}": part for entry, part in grade.reward.items() if entry != "score"}
        return Grade({"score": total, **parts})

    async def close(self) -> None:
        """Close every term, whatever happens to the others."""
        closed = await asyncio.gather(*(term.grader.close() for term in self._terms), return_exceptions=True)
        faults = [fault for fault in closed if isinstance(fault, BaseException)]
        if faults:
            raise BaseExceptionGroup("closing graders failed", faults)
