"""The verifiers of reasoning-gym; runs in a worker process only.

Some of them hand the answer to Python's `eval`, straight or through sympy. Here both take arithmetic and literals only.
"""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

from limes.rewards.guard import Refused, arithmetic_eval, guard_sympy

Verifier = Callable[[str | None, dict[str, Any]], float]


def load() -> Callable[[dict[str, Any]], float]:
    """The scorer of `{"item": metadata["reasoning_gym"], "answer": str or None}`."""
    import reasoning_gym

    guard_sympy()
    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym."):
            vars(module)["eval"] = arithmetic_eval

    @functools.cache
    def verifier(task: str, options: bytes) -> Verifier:
        chosen = pickle.loads(options)
        return (
            reasoning_gym.create_dataset(task, **chosen).score_answer
            if chosen
            else reasoning_gym.get_score_answer_fn(task)
        )

    def score(request: dict[str, Any]) -> float:
        task, options = task_of(request["item"])
        return verified(verifier(task, pickle.dumps(options)), request["answer"], request["item"]["entry"])

    return score


def task_of(item: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The task whose verifier counts, and its options; an entry of `composite` names its task itself."""
    task, options = item["task"], dict(item.get("options") or {})
    return (item["entry"]["metadata"]["source_dataset"], {}) if task == "composite" and not options else (task, options)


def verified(verify: Verifier, answer: str | None, entry: dict[str, Any]) -> float:
    """The verifier's score. An answer that it cannot read scores 0; one that cannot even read its own answer raises."""
    try:
        return float(verify(answer, entry))
    except Refused:
        return 0.0
    except Exception:  # noqa: BLE001 (what verifiers raise over an answer is anyone's guess)
        verify(entry["answer"], entry)
        return 0.0
