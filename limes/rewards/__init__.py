"""Rewards: graders, and the killable processes they run in.

Names are imported when first used, so that a grader's process loads nothing it does not need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from limes.rewards.build import build_grader
    from limes.rewards.grade import Grade, Grader, GraderError, scalar_reward
    from limes.rewards.maths import math_reward
    from limes.rewards.overlong import overlong_penalty
    from limes.rewards.simple import token_f1

__all__ = [
    "Grade",
    "Grader",
    "GraderError",
    "build_grader",
    "math_reward",
    "overlong_penalty",
    "scalar_reward",
    "token_f1",
]

_HOMES = {
    "Grade": "grade",
    "Grader": "grade",
    "GraderError": "grade",
    "build_grader": "build",
    "math_reward": "maths",
    "overlong_penalty": "overlong",
    "scalar_reward": "grade",
    "token_f1": "simple",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
