"""When saving and evaluation fall due."""

from __future__ import annotations

from pathlib import Path

from limes.config import Config
from limes.run.folder import RunFolder
from limes.run.samples import samples_path


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


def owes_evaluation(config: Config, start_rollout_id: int, num_rollout_per_epoch: int | None) -> bool:
    """Whether an evaluation of a checkpoint's weights fell due where it was saved, and has not been made."""
    saved = start_rollout_id - 1
    if saved < 0 or saved < config.critic.num_critic_only_steps:  # none falls due while the critic learns alone
        return False
    if not should_run_periodic_action(saved, config.eval.interval, num_rollout_per_epoch):
        return False
    assert config.checkpoint.load is not None, "a run that starts later goes on from a checkpoint"
    run = RunFolder(Path(config.checkpoint.load).resolve().parent.parent)
    return not samples_path(run.rollouts, start_rollout_id, "eval").is_file()
