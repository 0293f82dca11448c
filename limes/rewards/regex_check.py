"""Regular expressions over model output; runs in a worker process, as a pattern may backtrack for ever."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from limes.rewards.text import after_thinking


def load() -> Callable[[dict[str, Any]], float]:
    """The scorer of `{"pattern": str, "response": str, "labels": list of str, or None}`."""
    return score


def score(request: dict[str, Any]) -> float:
    """1 when the pattern occurs and, with labels, the first group of its last occurrence is one of them."""
    matches = list(re.finditer(request["pattern"], after_thinking(request["response"])))
    if request["labels"] is None or not matches:
        return float(bool(matches))
    return float((matches[-1].group(1) or "").strip() in request["labels"])
