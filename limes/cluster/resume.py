"""Going on from a checkpoint: `checkpoint.load`."""

from __future__ import annotations

from pathlib import Path

from limes.cluster.handles import CriticGroup, RolloutManagerHandle, TrainGroup
from limes.config import Config
from limes.rollout.state import FILE, read_state


def refuse_unusable_checkpoint(config: Config) -> None:
    """Look at what `checkpoint.load` names before anything is loaded.

    Raises:
        ValueError: it is no checkpoint, lacks a model that this run needs, or leaves nothing to do.
    """
    from limes.training.checkpoint import CRITIC, MODEL, refuse_incomplete

    if config.checkpoint.load is None:
        return
    folder = Path(config.checkpoint.load)
    if not (folder / FILE).is_file():
        what = "not a checkpoint" if folder.is_dir() else "no such folder"
        raise ValueError(f"checkpoint.load = {str(folder)!r}: {what}; {_hint(folder)}")
    start = read_state(folder)[0] + 1
    refuse_nothing_to_do(config, start)
    if has_actor(config, folder, start):
        if (folder / CRITIC).exists() and not (folder / MODEL).exists():
            raise ValueError(
                f"checkpoint.load = {str(folder)!r} is from when the critic learned alone and holds no actor, but "
                f"critic.num_critic_only_steps is {config.critic.num_critic_only_steps}; set it to {start} or more, "
                "with algorithm.advantage_estimator = ppo"
            )
        refuse_incomplete(folder)
    if config.algorithm.advantage_estimator == "ppo":
        refuse_incomplete(folder / CRITIC)


async def load_checkpoint(
    config: Config, actor: TrainGroup, critic: CriticGroup | None, manager: RolloutManagerHandle
) -> None:
    """Go on from `checkpoint.load`.

    Raises:
        ValueError: it is of another model, or leaves nothing to do.
    """
    assert config.checkpoint.load is not None
    folder = Path(config.checkpoint.load)
    start = await manager.load(folder) + 1
    if has_actor(config, folder, start):
        await actor.load(folder)
    else:
        await actor.skip_versions(start)  # engines may have been given the same weights after each of its rollouts
    if critic is not None:
        await critic.load(folder)
    refuse_nothing_to_do(config, start)
    actor.start_rollout_id = start


def has_actor(config: Config, folder: Path, start_rollout_id: int) -> bool:
    """Whether an actor is to be loaded: while the critic learns alone none is saved, as it is still at its start."""
    from limes.training.checkpoint import MODEL

    return start_rollout_id > config.critic.num_critic_only_steps or (folder / MODEL).exists()


def refuse_nothing_to_do(config: Config, start_rollout_id: int) -> None:
    """A run that would train nothing is no success.

    Raises:
        ValueError: the checkpoint is of the last rollout or a later one.
    """
    num_rollout = config.rollout.num_rollout
    if num_rollout and start_rollout_id >= num_rollout:
        raise ValueError(
            f"checkpoint.load = {config.checkpoint.load!r} is from after rollout {start_rollout_id - 1} and "
            f"rollout.num_rollout is {num_rollout}, so nothing is left to do; raise rollout.num_rollout"
        )


def _hint(folder: Path) -> str:
    found = _newest(folder) or _newest(folder.parent)
    return f"did you mean {found}?" if found else "name one such as runs/<name>/checkpoints/000010"


def _newest(folder: Path) -> Path | None:
    """The newest checkpoint of a run's folder, or of its folder of checkpoints."""
    found = (path for place in (folder, folder / "checkpoints") for path in place.glob(f"*/{FILE}"))
    return max((path.parent for path in found if path.parent.name.isdecimal()), default=None)
