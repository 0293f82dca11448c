"""Weights that correct for who sampled the tokens: another numerical engine, or an older policy.

Corrections return detached per-token weights for the policy loss, and metrics. A weight is 0 exactly on tokens that are
rejected or masked out, so `kept(weights)` is the mask of tokens that still train. Whether rejected tokens leave the
loss's denominator is a choice of the caller: count `step_total` on `kept(weights)` (they leave, the default of limes)
or on the mask itself (they stay, as in slime).

A masked-in token whose engine log-prob is missing (NaN or infinite) is rejected, counted by `missing_log_probs`, and
left out of its sequence's weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from limes.algorithms.choices import choose
from limes.algorithms.packed import (
    Lengths,
    check_packed,
    ratio,
    repeat_per_token,
    select,
    sequence_sums,
    trained_lengths,
)

Correction = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def truncated_importance(
    trainer_log_probs: Tensor,
    rollout_log_probs: Tensor,
    *,
    high: float,
    low: float = 0.0,
    level: str = "token",
    lengths: Lengths | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Importance weights clamped to the window: clip(exp(trainer - rollout), low, high).

    TIS (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training") caps at 2 on tokens.

    Args:
        trainer_log_probs: `[num_tokens]` of the trainer's policy before this rollout's first step.
        rollout_log_probs: `[num_tokens]` as the engine recorded them while sampling.
        high: upper end of the window.
        low: lower end.
        level: `token`: each token its own ratio; `sequence`: the product over the sequence; `geometric`: the geometric
            mean over the sequence. The last two give all tokens of a sequence one weight.
        lengths: tokens of each sequence, for sequence levels.
        mask: `[num_tokens]`, not 0 on trained tokens; None is all.

    Returns:
        Weights `[num_tokens]`, detached, in the dtype of `trainer_log_probs`; metrics.

    Raises:
        ValueError: unknown level, lengths missing for a sequence level, an empty window, shapes that differ.
    """
    raw, trained, metrics = _weights(trainer_log_probs, rollout_log_probs, level, lengths, mask)
    weights = raw.clamp(*_window(low, high))
    metrics["tis_clipfrac"] = (weights != raw).to(raw.dtype)
    return select(weights, trained), metrics


def masked_importance(
    trainer_log_probs: Tensor,
    rollout_log_probs: Tensor,
    *,
    low: float,
    high: float,
    level: str = "token",
    veto: float | None = None,
    lengths: Lengths | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Importance weights inside the window and 0 outside: rejected tokens neither push nor pull.

    MIS (Liu et al. 2025, "When speed kills stability"). Arguments, returns and errors as in `truncated_importance`, and

    Args:
        veto: also reject a sequence that has a token with a ratio below this; needs `lengths`. None is no veto.
    """
    raw, trained, metrics = _weights(trainer_log_probs, rollout_log_probs, level, lengths, mask)
    floor, ceiling = _window(low, high)
    inside = (raw >= floor) & (raw <= ceiling)
    if veto is not None:
        log_ratio = select(trainer_log_probs.detach() - rollout_log_probs.detach(), trained)
        vetoed = (trained & (ratio(log_ratio) < veto)).to(raw.dtype)
        inside &= _spread(sequence_sums(vetoed, _needed(lengths, "veto")), lengths, raw) == 0
    metrics["tis_clipfrac"] = (~inside).to(raw.dtype)
    return select(raw, trained & inside), metrics


def icepop(
    trainer_log_probs: Tensor,
    rollout_log_probs: Tensor,
    *,
    low: float = 0.5,
    high: float = 5.0,
    lengths: Lengths | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Masked importance on tokens with the window of IcePop (Ling team 2025, arXiv:2510.18855)."""
    return masked_importance(trainer_log_probs, rollout_log_probs, low=low, high=high, lengths=lengths, mask=mask)


def uncorrected(
    trainer_log_probs: Tensor,
    rollout_log_probs: Tensor,
    *,
    lengths: Lengths | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weight 1 on every masked-in token, missing engine log-probs included, with the metrics of a correction."""
    raw, _, metrics = _weights(trainer_log_probs, rollout_log_probs, "token", lengths, mask)
    return select(torch.ones_like(raw), mask), metrics


def off_policy_sequence_mask(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    delta: float,
    lengths: Lengths,
    mask: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Reject tokens with a negative advantage in sequences that the policy has left behind.

    OPSM (DeepSeek-V3.2, arXiv:2512.02556, "off-policy sequence masking"): weight 0 where A < 0 and the
    mean of old - current log-probs over the sequence's masked-in tokens is above `delta`; 1 elsewhere.

    Args:
        log_probs: `[num_tokens]` of the current policy; no gradient is taken.
        old_log_probs: `[num_tokens]` of the policy that sampled.
        advantages: `[num_tokens]`.
        delta: KL per token, in nats.
        lengths: tokens of each sequence.
        mask: `[num_tokens]`, not 0 on trained tokens.

    Returns:
        Weights `[num_tokens]`, 0 or 1, and metrics.
    """
    check_packed(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, mask=mask)
    difference = old_log_probs.detach() - log_probs.detach()
    present = (mask != 0) & difference.isfinite()
    divergence = _sequence_mean(select(difference, present), lengths, present)
    rejected = (select(advantages.detach(), mask) < 0) & (divergence > delta)
    metrics = {"opsm_clipfrac": rejected.to(log_probs.dtype), "opsm_kl": divergence}
    return select((~rejected).to(log_probs.dtype), mask), metrics


def kept(weights: Tensor) -> Tensor:
    """Bool mask of the tokens that still train under these weights."""
    return weights > 0


CORRECTIONS: Mapping[str, Correction] = MappingProxyType(
    {"none": uncorrected, "tis": truncated_importance, "mis": masked_importance, "icepop": icepop}
)
"""Corrections by name; all take (trainer_log_probs, rollout_log_probs, *, lengths, mask, ...)."""


def _weights(
    trainer_log_probs: Tensor, rollout_log_probs: Tensor, level: str, lengths: Lengths | None, mask: Tensor | None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Unbounded weights, the tokens that have one, and the metrics of the mismatch."""
    check_packed(trainer_log_probs=trainer_log_probs, rollout_log_probs=rollout_log_probs, mask=mask)
    by_level = choose(_LEVELS, level, "correction level")
    difference = trainer_log_probs.detach() - rollout_log_probs.detach()
    wanted = torch.ones_like(difference, dtype=torch.bool) if mask is None else mask != 0
    present = wanted & difference.isfinite()
    log_ratio = select(difference, present)
    raw = ratio(by_level(log_ratio, lengths, present))
    metrics = {
        "tis": raw,
        "tis_max": raw,
        "tis_abs": (raw - 1).abs(),
        "train_rollout_logprob_abs_diff": log_ratio.abs(),
        "train_rollout_logprob_abs_diff_max": log_ratio.abs(),
        "rollout_kl": -log_ratio,
        "rollout_kl_k3": ratio(log_ratio) - 1 - log_ratio,
        "missing_log_probs": (wanted & ~present).to(raw.dtype),
    }
    return raw, present, metrics


def _window(low: float, high: float) -> tuple[float, float]:
    if not 0 <= low < high:
        raise ValueError(f"importance window low={low}, high={high}: needs 0 <= low < high")
    return low, high


def _token(log_ratio: Tensor, _lengths: Lengths | None, _present: Tensor) -> Tensor:
    return log_ratio


def _sequence_sum(log_ratio: Tensor, lengths: Lengths | None, _present: Tensor) -> Tensor:
    return _spread(sequence_sums(log_ratio, _needed(lengths, "level 'sequence'")), lengths, log_ratio)


def _sequence_mean(log_ratio: Tensor, lengths: Lengths | None, present: Tensor) -> Tensor:
    lengths = _needed(lengths, "level 'geometric'")
    return _spread(
        sequence_sums(log_ratio, lengths) / trained_lengths(present, lengths).clamp(min=1), lengths, log_ratio
    )


def _spread(per_sequence: Tensor, lengths: Lengths | None, like: Tensor) -> Tensor:
    assert lengths is not None
    return repeat_per_token(per_sequence, lengths, like.numel())


def _needed(lengths: Lengths | None, what: str) -> Lengths:
    if lengths is None:
        raise ValueError(f"correction {what} works on whole sequences: pass lengths=")
    return lengths


_LEVELS: Mapping[str, Callable[[Tensor, Lengths | None, Tensor], Tensor]] = MappingProxyType(
    {"token": _token, "sequence": _sequence_sum, "geometric": _sequence_mean}
)
