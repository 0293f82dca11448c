"""When saving and evaluation fall due."""

from __future__ import annotations


def should_run_periodic_action(
    rollout_id: int,
    interval: int | None,
    num_rollout_per_epoch: int | None,
    num_rollout: int | None = None,
    *,
    previous_rollout_id: int | None = None,
) -> bool:
    """Whether an action is due after rollout `rollout_id`.

    It is due after every `interval` rollouts, at the end of each epoch, and after the last rollout when `num_rollout`
    is given. Where rollouts are jumped, `previous_rollout_id` is the last one asked about: what fell due in between is
    due now, once. Without an interval it is never due.
    """
    if interval is None:
        return False
    if num_rollout is not None and rollout_id == num_rollout - 1:
        return True
    finished = rollout_id + 1
    finished_before = rollout_id if previous_rollout_id is None else previous_rollout_id + 1
    periods = [interval] if num_rollout_per_epoch is None else [interval, num_rollout_per_epoch]
    return any(finished // period > finished_before // period for period in periods)
