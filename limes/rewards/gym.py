"""Answers to reasoning-gym tasks, scored by the task's own verifier in a process that can be killed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Literal, get_args

from limes.records import Reward, Sample
from limes.rewards.grade import EachSample
from limes.rewards.process import WorkerPool
from limes.rewards.simple import find_last_integer
from limes.rewards.text import after_thinking, last_box, last_line, last_tagged

Extract = Literal["auto", "whole", "last_line", "last_integer"]
FULL_SCORE = 1.0 - 1e-9


def gym_answer(response: str, extract: Extract = "auto") -> str | None:
    r"""The part of a response that the verifier gets: of what follows the last `</think>`,

    - `auto`: the last `<answer>...</answer>`, else the last complete `\boxed{}`, else all of it;
    - `whole`: all of it; `last_line`: the last line that is not blank; `last_integer`: as the grader of that name.

    White space at both ends is left out. None when nothing is there.
    """
    text = after_thinking(response).strip()
    if extract == "last_integer":
        return find_last_integer(text)
    if extract == "last_line":
        return last_line(text) or None
    if extract == "auto":
        for found in (last_tagged(text), last_box(text)):
            if found is not None:
                return found or None
    return text or None


class GymGrader(EachSample):
    """Scores with the verifier that `metadata["reasoning_gym"] = {"task": name, "entry": item}` names.

    An entry "options" there, the settings that the task was generated with, is used too: some verifiers depend on them.

    Args:
        binarise: verifiers give small credits (0.01 to 0.05) for the format of a wrong answer and parts of 1 for partly
            right ones; True makes all below 1 a 0, False passes them on.
        extract: see `gym_answer`.
        timeout_s: a verifier that takes longer is a grader error.
        num_workers: processes.

    Raises:
        ValueError: reasoning-gym is not installed, or `extract` is unknown.
    """

    def __init__(
        self, *, binarise: bool = True, extract: Extract = "auto", timeout_s: float = 10.0, num_workers: int = 1
    ) -> None:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ValueError('reward.kind = "reasoning_gym" needs the package reasoning-gym; pip install "limes[gym]"')
        if extract not in get_args(Extract):
            raise ValueError(f"extract = {extract!r} is none of {', '.join(get_args(Extract))}")
        super().__init__()
        self._binarise, self._extract, self._timeout_s = binarise, extract, timeout_s
        self.pool = WorkerPool("limes.rewards.gym_check", num_workers)

    async def score(self, sample: Sample) -> Reward:
        """The verifier's score, binarised if so set."""
        item = sample.metadata.get("reasoning_gym")
        if not isinstance(item, Mapping) or not {"task", "entry"} <= item.keys():
            raise ValueError(
                'metadata has no "reasoning_gym": {"task", "entry"}; take the prompts from reasoning_gym:<task>'
            )
        request: dict[str, Any] = {"item": dict(item), "answer": gym_answer(sample.response, self._extract)}
        score = await self.pool.call_async(request, self._timeout_s)
        return float(score >= FULL_SCORE) if self._binarise else score

    async def close(self) -> None:
        """End the worker processes."""
        self.pool.close()
