"""Answers scored by a regular expression."""

from __future__ import annotations

import re
from typing import Any

from limes.records import Reward, Sample
from limes.rewards.grade import EachSample
from limes.rewards.process import WorkerPool
from limes.rewards.text import label_texts


class RegexGrader(EachSample):
    """1 where the pattern occurs in what follows the last `</think>`.

    A pattern with a group has to capture the label as well: the first group of its last occurrence, without white space
    at both ends, equals the label or an entry of a label that is a list. Other groups are written `(?:...)`.

    Args:
        pattern: in Python's syntax; flags go inside, as in `(?s)`.
        timeout_s: a search that takes longer is a grader error; it runs in a process that is then killed.
        num_workers: processes.

    Raises:
        ValueError: the pattern cannot be compiled.
    """

    def __init__(self, *, pattern: str, timeout_s: float = 10.0, num_workers: int = 1) -> None:
        try:
            self._captures = re.compile(pattern).groups > 0
        except re.error as error:
            raise ValueError(f"pattern = {pattern!r} is no regular expression: {error}") from error
        super().__init__()
        self._pattern, self._timeout_s = pattern, timeout_s
        self.pool = WorkerPool("limes.rewards.regex_check", num_workers)

    async def score(self, sample: Sample) -> Reward:
        """1.0 or 0.0."""
        labels = label_texts(sample.label) if self._captures else None
        request: dict[str, Any] = {"pattern": self._pattern, "response": sample.response, "labels": labels}
        return await self.pool.call_async(request, self._timeout_s)

    async def close(self) -> None:
        """End the worker processes."""
        self.pool.close()
