"""Estimates of KL(policy || reference) from the log-probs of sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

from limes.algorithms.choices import choose
from limes.algorithms.packed import check_packed, ratio, select

LOW_VAR_LIMIT = 10.0
"""`low_var_kl` is clamped to this size."""


def penalty(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    kind: str = "k1",
    *,
    old_log_probs: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Per-token KL estimate, with d = log_probs - ref_log_probs (Schulman 2020, "Approximating KL divergence").

    ============  ==================  =================  =============================================
    kind          value               gradient (by d)    as a loss, on average over sampled tokens
    ============  ==================  =================  =============================================
    k1            d                   1                  no gradient at all; belongs in the reward
    k2            d^2 / 2             d                  the gradient of KL(policy || reference)
    k3            exp(-d) - 1 + d     1 - exp(-d)        the gradient of KL(reference || policy)
    low_var_kl    k3 within +-10      as k3 inside       as k3
    ============  ==================  =================  =============================================

    Args:
        log_probs: `[num_tokens]` of the current policy, with gradient where the penalty is a loss.
        ref_log_probs: `[num_tokens]` of the reference; never gets a gradient.
        kind: one of the table.
        old_log_probs: `[num_tokens]` of the policy that sampled. Given, the estimate is multiplied by
            exp(log_probs - old_log_probs), gradient included: unbiased when the samples are off-policy, and k1 and k3
            as losses then have the gradient of KL(policy || reference) (DeepSeek-V3.2, arXiv:2512.02556).
        mask: `[num_tokens]`, not 0 on trained tokens; elsewhere the penalty and its gradients are 0. None is all.

    Returns:
        `[num_tokens]` in the dtype of `log_probs`.

    Raises:
        ValueError: unknown `kind`, shapes that differ.
    """
    estimate = choose(_ESTIMATES, kind, "kl kind")
    check_packed(log_probs=log_probs, ref_log_probs=ref_log_probs, old_log_probs=old_log_probs, mask=mask)
    current = select(log_probs, mask)
    result = estimate(current - select(ref_log_probs.detach(), mask))
    if old_log_probs is not None:
        result = result * ratio(current - select(old_log_probs.detach(), mask))
    return result


def _k1(d: Tensor) -> Tensor:
    return d


def _k2(d: Tensor) -> Tensor:
    return d**2 / 2


def _k3(d: Tensor) -> Tensor:
    return ratio(-d) - 1 + d


def _low_var_kl(d: Tensor) -> Tensor:
    return _k3(d).clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT)


_ESTIMATES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"k1": _k1, "k2": _k2, "k3": _k3, "low_var_kl": _low_var_kl}
)
KINDS = tuple(_ESTIMATES)
"""Names that `penalty` knows."""
