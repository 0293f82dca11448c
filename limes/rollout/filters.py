"""Which groups are worth training on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from limes.records import Group, Reward, Sample, Status
from limes.rewards import scalar_reward
from limes.rewards.function import import_function
from limes.rollout.handed import SETTLED, handed_out, refuse_changes

Filter = Callable[[Group], tuple[bool, str]]
"""Takes a group, returns whether to keep it and why not."""

OUTCOME = "outcome"
SETTING = "rollout.dynamic_sampling_filter"


def load_filter(name: str | None, *, reward_key: str | None, leave_out_truncated: bool) -> Filter | None:
    """The filter of `rollout.dynamic_sampling_filter`.

    A filter of the user's that fails drops the group, with its error as the reason: the rollout is refilled and, if
    that goes on, ends with an error that lists the reasons. It gets copies of the samples.

    Args:
        reward_key: entry of dict rewards that counts.
        leave_out_truncated: answers cut at the length limit do not train, so they do not count here either.

    Raises:
        ValueError: it is no built-in name and cannot be imported.
    """
    if name is None:
        return None
    if name == "nonzero_std":
        return lambda group: nonzero_std(group, reward_key=reward_key, leave_out_truncated=leave_out_truncated)
    if ":" not in name:
        raise ValueError(f'{SETTING} = "{name}" is not a filter; use nonzero_std or module:function')
    function = import_function(name, SETTING)

    def guarded(group: Group) -> tuple[bool, str]:
        try:
            handed = [handed_out(sample) for sample in group]
            keep, reason = function(handed)
            for sample, copied in zip(group, handed, strict=True):
                refuse_changes(sample, copied, "it", (*SETTLED, "reward"))
            return bool(keep), str(reason)
        except Exception as error:  # noqa: BLE001 (a user's function may raise anything; it costs the group)
            return False, f"{name} raised {type(error).__name__}: {error}"

    return guarded


def nonzero_std(
    group: Sequence[Sample | Sequence[Sample]], *, reward_key: str | None = None, leave_out_truncated: bool = False
) -> tuple[bool, str]:
    """Drop a group whose outcomes are all equal: it has no better and no worse answer to learn from.

    Outcomes are compared, no spread is computed, so rounding cannot keep a dead group. Samples that failed or are
    unscored do not count; a trajectory that became several samples, nested or with one `rollout_id`, counts once.
    """
    outcomes = outcomes_of(group, reward_key=reward_key, leave_out_truncated=leave_out_truncated)
    if not outcomes:
        return False, "no scored answer"
    if all(outcome == outcomes[0] for outcome in outcomes):
        return False, f"all rewards {outcomes[0]:g}"
    return True, ""


def outcomes_of(
    group: Sequence[Sample | Sequence[Sample]], *, reward_key: str | None, leave_out_truncated: bool = False
) -> list[float]:
    """One outcome for each trajectory of a group that has one."""
    outcomes: dict[Any, float] = {}
    for sample in flat(group):
        counts = sample.status is Status.COMPLETED or (sample.status is Status.TRUNCATED and not leave_out_truncated)
        reward = outcome_reward(sample.reward, reward_key) if counts else None
        if reward is not None:
            outcomes.setdefault(("own", sample.index) if sample.rollout_id is None else sample.rollout_id, reward)
    return list(outcomes.values())


def outcome_reward(reward: Reward, reward_key: str | None) -> float | None:
    """How good an answer is in the end, before anything shapes what it trains on.

    A dict reward may tell it apart from the trained entry as `outcome`; otherwise it is what the grader gave, before
    `algorithm.truncated`.
    """
    if isinstance(reward, Mapping) and OUTCOME in reward:
        return scalar_reward(reward, OUTCOME)
    return scalar_reward(reward, reward_key)


def flat(group: Iterable[Sample | Sequence[Sample]]) -> list[Sample]:
    """The samples of a group, whether trajectories are samples or lists of samples."""
    return [sample for item in group for sample in ([item] if isinstance(item, Sample) else item)]
