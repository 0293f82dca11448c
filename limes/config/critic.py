"""Settings of the critic."""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat

from limes.config.base import Section


class CriticConfig(Section):
    """The model that learns to foresee rewards; it exists with `algorithm.advantage_estimator = ppo` alone.

    What is not here, such as AdamW's numbers and the cut into steps and micro-batches, it shares with the trainer.
    """

    path: str | None = None
    """What its layers start from, as in `model.path`, or an earlier critic; default: the policy's own start."""

    lr: PositiveFloat = 1e-5
    """Peak learning rate."""

    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up, over all optimizer steps of the run."""

    lr_warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""

    min_lr: NonNegativeFloat = 0.0
    """Where `linear` and `cosine` end."""

    clip_grad: NonNegativeFloat = 1.0
    """Largest gradient norm; 0 turns clipping off. The logged norm is the one before clipping."""

    value_clip: PositiveFloat | None = 0.2
    """How far a value may move from where the rollout found it before it stops learning; none turns it off."""

    num_critic_only_steps: NonNegativeInt = 0
    """Rollouts at the start of the run on which the critic learns alone and the policy stays as it is."""
