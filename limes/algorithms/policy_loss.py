"""Policy losses per token. Each is a ratio of probabilities and a trust region around 1.

All take `(log_probs, old_log_probs, advantages, *, lengths, mask, ...)` and return the per-token loss and detached
per-token metrics; see `limes.algorithms.metrics` for how those are reduced. Gradients flow through `log_probs` alone.
Where the mask is 0 nothing is read, and the loss and every gradient are exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from limes.algorithms.packed import (
    Lengths,
    check_packed,
    ratio,
    repeat_per_token,
    select,
    sequence_sums,
    trained_lengths,
)

PolicyLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def clipped(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
    proximal_log_probs: Tensor | None = None,
    lengths: Lengths | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate, -min(r A, clip(r, 1 - eps_clip, 1 + eps_clip_high) A) with r = exp(log_probs - old).

    PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7). DAPO's clip-higher is `eps_clip_high` (arXiv:2503.14476, eq.
    8). Dual clip is `eps_clip_c` (Ye et al. 2020, arXiv:1912.09729): where A < 0 the loss is at most -eps_clip_c A.
    With `proximal_log_probs` it is decoupled PPO (Hilton et al. 2021, arXiv:2110.00641): the trust region is around the
    proximal policy, and exp(proximal - old) weighs each token. To bound that weight, leave `proximal_log_probs` out,
    give the proximal log-probs as the old ones, and weigh by `corrections.truncated_importance(proximal, old)`.

    Args:
        log_probs: `[num_tokens]` of the current policy, with gradient; float32 or float64.
        old_log_probs: `[num_tokens]` of the policy that sampled.
        advantages: `[num_tokens]`.
        eps_clip: how far below 1 the ratio still moves the loss.
        eps_clip_high: how far above 1; None is `eps_clip`.
        eps_clip_c: bound of the loss where A < 0, as a ratio above 1; None is no bound.
        proximal_log_probs: `[num_tokens]` of a recent policy, the centre of the trust region; None is `old_log_probs`.
        lengths: not used; all losses share one signature.
        mask: `[num_tokens]`, not 0 on trained tokens; None trains all.

    Returns:
        Loss `[num_tokens]` and metrics.

    Raises:
        ValueError: shapes that differ, `eps_clip_c` not above 1.
    """
    check_packed(
        log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, proximal=proximal_log_probs, mask=mask
    )
    centre = old_log_probs if proximal_log_probs is None else proximal_log_probs
    log_ratio = _log_ratio(log_probs, centre, mask)
    loss, metrics = _clip(log_ratio, select(advantages.detach(), mask), eps_clip, eps_clip_high, eps_clip_c)
    metrics |= _drift(log_ratio)
    if proximal_log_probs is not None:
        weight = ratio(_log_ratio(proximal_log_probs.detach(), old_log_probs, mask))
        loss = loss * weight
        metrics |= {"behaviour_weight": weight, "behaviour_weight_max": weight}
    return loss, metrics


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    lengths: Lengths,
    mask: Tensor,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate with one ratio a sequence: the geometric mean of its masked-in tokens' ratios.

    GSPO (Zheng et al. 2025, arXiv:2507.18071, eqs. 5-7). Every token carries its sequence's ratio and its own
    advantage; the gradient reaches each token through the mean. The paper clips at 3e-4 and 4e-4 and aggregates by
    `sequence_mean`. Arguments, returns and errors as in `clipped`.
    """
    check_packed(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, mask=mask)
    token_log_ratio = _log_ratio(log_probs, old_log_probs, mask)
    means = sequence_sums(token_log_ratio, lengths) / trained_lengths(mask, lengths).clamp(min=1)
    log_ratio = select(repeat_per_token(means, lengths, log_probs.numel()), mask)
    loss, metrics = _clip(log_ratio, select(advantages.detach(), mask), eps_clip, eps_clip_high, eps_clip_c)
    sequence_ratio = ratio(log_ratio.detach())
    return loss, metrics | _drift(token_log_ratio) | {"ratio": sequence_ratio, "ratio_max": sequence_ratio}


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    lengths: Lengths | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A policy gradient whose clipped ratio is a constant weight, so that no token loses its gradient.

    CISPO (MiniMax 2025, arXiv:2506.13585, eqs. 4-5): -stop_gradient(clip(r, 1 - eps_clip, 1 + eps_clip_high)) A
    log_prob. The paper leaves the lower side open, which is `eps_clip=1`. The value means nothing; its gradient does.
    Arguments, returns and errors as in `clipped`.
    """
    check_packed(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, mask=mask)
    low, high = _window(eps_clip, eps_clip_high)
    log_ratio = _log_ratio(log_probs, old_log_probs, mask).detach()
    raw = ratio(log_ratio)
    weight = raw.clamp(low, high)
    loss = -weight * select(advantages.detach(), mask) * select(log_probs, mask)
    return loss, {"pg_clipfrac": (weight != raw).to(loss.dtype)} | _drift(log_ratio)


def reinforce(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    lengths: Lengths | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The plain policy gradient, -A log_prob, with neither ratio nor trust region (Williams 1992).

    Right for one optimizer step a rollout, or under an importance correction. `old_log_probs` only feed the metrics.
    Arguments, returns and errors as in `clipped`.
    """
    check_packed(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, mask=mask)
    loss = -select(advantages.detach(), mask) * select(log_probs, mask)
    return loss, _drift(_log_ratio(log_probs, old_log_probs, mask))


POLICY_LOSSES: Mapping[str, PolicyLoss] = MappingProxyType(
    {"clipped": clipped, "gspo": gspo, "cispo": cispo, "reinforce": reinforce}
)
"""Losses by name. A loss of one's own is any function of the same form."""


def _window(eps_clip: float, eps_clip_high: float | None) -> tuple[float, float]:
    return 1 - eps_clip, 1 + (eps_clip if eps_clip_high is None else eps_clip_high)


def _log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor | None) -> Tensor:
    return select(log_probs, mask) - select(old_log_probs.detach(), mask)


def _clip(
    log_ratio: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float | None, eps_clip_c: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate of a log ratio, with the share of tokens on the clipped branch."""
    if eps_clip_c is not None and eps_clip_c <= 1:
        raise ValueError(f"eps_clip_c={eps_clip_c}: the dual clip bounds a ratio and must be above 1, such as 3")
    raw = ratio(log_ratio)
    free, bounded = -raw * advantages, -raw.clamp(*_window(eps_clip, eps_clip_high)) * advantages
    loss = torch.maximum(free, bounded)
    metrics = {"pg_clipfrac": (bounded > free).to(loss.dtype)}
    if eps_clip_c is not None:
        ceiling = -eps_clip_c * advantages
        over = (advantages < 0) & (loss > ceiling)
        loss = torch.where(over, ceiling, loss)
        metrics["pg_clipfrac_lower"] = over.to(loss.dtype)
    return loss, metrics


def _drift(log_ratio: Tensor) -> dict[str, Tensor]:
    """How far the policy has moved: ratio, and k1 and k3 estimates of KL(old || current)."""
    log_ratio = log_ratio.detach()
    moved = ratio(log_ratio)
    return {"ratio": moved, "ratio_max": moved, "ppo_kl": -log_ratio, "ppo_kl_k3": moved - 1 - log_ratio}
