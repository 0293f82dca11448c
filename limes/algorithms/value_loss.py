"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from limes.algorithms.packed import check_packed, select
from limes.algorithms.whitening import Moments


def clipped(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    value_clip: float | None,
    mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Squared error to the returns, with the value held near what it was when the rollout was scored.

    max((clip(V, V_old - c, V_old + c) - R)^2, (V - R)^2), without a factor 1/2, which the coefficient or learning
    rate of the critic holds; as in PPO's reference code (Schulman et al. 2017) and slime.

    Args:
        values: `[num_tokens]` of the current critic, with gradient.
        old_values: `[num_tokens]` of the critic before this rollout's first step.
        returns: `[num_tokens]` targets.
        value_clip: c; None is the plain squared error.
        mask: `[num_tokens]`, not 0 on trained tokens; elsewhere loss and gradients are 0. None is all.

    Returns:
        Loss `[num_tokens]` and detached per-token metrics.
    """
    check_packed(values=values, old_values=old_values, returns=returns, mask=mask)
    current, target, before = select(values, mask), select(returns.detach(), mask), select(old_values.detach(), mask)
    loss = (current - target) ** 2
    metrics = {"values": current.detach(), "value_error": current.detach() - target}
    if value_clip is not None:
        bounded = (torch.clamp(current, before - value_clip, before + value_clip) - target) ** 2
        metrics["value_clipfrac"] = (bounded > loss).to(loss.dtype).detach()
        loss = torch.maximum(loss, bounded)
    return loss, metrics


def explained_variance(errors: Moments, returns: Moments) -> float | None:
    """1 - Var(R - V) / Var(R): 1 when all is foreseen, 0 for a critic that says a constant, below 0 for worse.

    Args:
        errors: moments of R - V over the masked-in tokens of the whole step (`whitening.measure`, `merge_moments`).
        returns: moments of R.

    Returns:
        None where the returns are all the same but for rounding, or there are none.
    """
    rounding = 1e-6 * torch.maximum(returns.low.abs(), returns.high.abs())
    if not bool(returns.high - returns.low > rounding):
        return None
    return 1.0 - float(errors.squares) / float(returns.squares)
