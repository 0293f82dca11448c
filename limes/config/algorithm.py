"""Settings of advantages and the loss."""

from typing import Literal

from pydantic import Field, PositiveFloat

from limes.config.base import Section


class AlgorithmConfig(Section):
    """From rewards to advantages to the loss."""

    advantage_estimator: Literal["grpo"] = "grpo"
    """`grpo`: reward less the group's mean, divided by the group's spread."""

    advantage_std: Literal["sample", "population", "none"] = "sample"
    """Spread that divides a centred reward: n-1, n, or no division (Dr.GRPO)."""

    advantage_eps: PositiveFloat = 1e-6
    """Added to the spread."""

    policy_loss: Literal["clipped"] = "clipped"
    """`clipped`: PPO's clipped ratio."""

    eps_clip: float = Field(default=0.2, gt=0, lt=1)
    """Ratio clip below 1."""

    eps_clip_high: PositiveFloat | None = None
    """Ratio clip above 1; default: `eps_clip`."""

    eps_clip_c: float | None = Field(default=None, gt=1)
    """Dual clip: bound of the loss for negative advantages, as a ratio; off by default."""

    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = "token_mean"
    """How token losses become one number; each is counted over the whole optimizer step."""

    aggregation_constant: PositiveFloat | None = None
    """Divisor of `constant` (Dr.GRPO); default: `rollout.max_response_len`."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    truncated: Literal["keep", "zero", "mask"] = "keep"
    """Answers cut at the length limit: keep their reward, set it to 0, or leave them out of training."""
