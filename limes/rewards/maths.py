r"""Mathematical answers, checked by math-verify in a process that can be killed.

What part of an answer counts is in `final_answer`. Where graders of the field differ, this one does so:

| answer                         | label           | reward | |
|--------------------------------|-----------------|--------|---|
| `\fbox{42}`                    | `42`            | 1      | a frame is a box |
| `**73**`                       | `73`            | 1      | Markdown and a box around the answer are optional |
| `x=5`                          | `5`             | 1      | the right side of an assignment; not `y=5` |
| `3\text{ cm}`, `3 cm`          | `3`             | 1      | units are not compared |
| `50\%`                         | `50\%`, `0.5`   | 1      | per cent is a hundredth, and ... |
| `50\%`                         | `50`            | 1      | ... its sign may be left out |
| `0.333`                        | `1/3`           | 0      | decimals must agree to 6 places ... |
| `0.333333`                     | `1/3`           | 1      | ... and then do |
| `1,234`, `1 234`, `1\,234`     | `1234`          | 1      | separators of thousands |
| `(1,234)`                      | `1234`          | 0      | a pair |
| `1, 2`                         | `2, 1`          | 1      | a bare list is a set |
| `1e3`                          | `1000`          | 1      | scientific notation |
| `\text{E}`, `(E)`, `E: a dog`  | `E`             | 1      | a label of one capital letter is a choice |
| `Monday`                       | `monday`        | 1      | labels in words are compared as words, without case |
| `\boxed{1} \boxed{2}`          | `2`             | 1      | only the last complete box counts |
| `\boxed{}`                     | anything        | 0      | |
| anything                       | empty           |        | `ValueError` |

An answer that takes longer than the limit, needs more than 1 GB or brings down its process twice scores 0.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from limes.records import Reward, Sample
from limes.rewards.grade import EachSample, TimedOut
from limes.rewards.process import OutOfMemory, WorkerDied, WorkerPool
from limes.rewards.text import label_text, last_box

DEFAULT_LIMIT_S = 2.0
SCORER = "limes.rewards.math_check"


def math_reward(response: str, label: Any, *, timeout_s: float = DEFAULT_LIMIT_S) -> float:
    """1.0 when the answer equals the label, else 0.0; the module's docstring says what counts as equal.

    May be called from any thread; it blocks. All callers share one worker process, which starts with the first call
    (about a second, outside the limit). `MathGrader` is for asyncio and may have several.

    Args:
        response: the model's text.
        label: the right answer as a number or as text, maybe boxed or after `####`.
        timeout_s: an answer that takes longer is wrong.

    Raises:
        ValueError: the label is empty or the limit is not positive.
        GraderError: the worker process does not start or was killed twice from outside.
    """
    pool = _shared_pool(os.getpid())
    request = math_request(response, label, timeout_s)
    try:
        return pool.call(request, timeout_s)
    except WRONG as error:
        return wrong(error)


@functools.lru_cache(maxsize=1)
def _shared_pool(process_id: int) -> WorkerPool:
    """The pool of `math_reward`; a forked process gets its own."""
    return WorkerPool(SCORER)


WRONG = (TimedOut, OutOfMemory, WorkerDied)
"""What an answer can do to a worker."""


def wrong(error: Exception) -> float:
    """0.0 where the answer is to blame; raises the error where it is not."""
    if isinstance(error, WorkerDied) and not error.own_fault:
        raise error
    return 0.0


def math_request(response: str, label: Any, timeout_s: float) -> dict[str, str]:
    """What a worker is asked.

    Raises:
        ValueError: the label is empty or the limit is not positive.
    """
    text = label_text(label)
    label_text(last_box(text) if last_box(text) is not None else text.rpartition("####")[2])
    if not timeout_s > 0:
        raise ValueError(f"timeout_s = {timeout_s} must be positive")
    return {"response": response, "label": text}


class MathGrader(EachSample):
    """Scores as `math_reward` does, in `num_workers` processes of its own and without blocking the event loop."""

    def __init__(self, *, timeout_s: float = DEFAULT_LIMIT_S, num_workers: int = 1) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self.pool = WorkerPool(SCORER, num_workers)

    async def score(self, sample: Sample) -> Reward:
        """1.0 or 0.0."""
        request = math_request(sample.response, sample.label, self._timeout_s)
        try:
            return await self.pool.call_async(request, self._timeout_s)
        except WRONG as error:
            return wrong(error)

    async def close(self) -> None:
        """End the worker processes."""
        self.pool.close()
