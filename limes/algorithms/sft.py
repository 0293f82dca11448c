"""Supervised fine-tuning: the negative log-prob of given tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from limes.algorithms.packed import Lengths, check_packed, repeat_per_token, select


def negative_log_likelihood(
    log_probs: Tensor, *, weights: Tensor | None = None, mask: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """-weight * log_prob of each token.

    Args:
        log_probs: `[num_tokens]` of the current policy, with gradient.
        weights: `[num_tokens]`, such as from `message_weights`; None is 1. Weights do not enter the denominators, which
            count tokens: a weight of 2 pulls twice as hard.
        mask: `[num_tokens]`, not 0 on trained tokens; elsewhere loss and gradients are 0. None is all.

    Returns:
        Loss `[num_tokens]` and detached per-token metrics; `nll` is without weights.
    """
    check_packed(log_probs=log_probs, weights=weights, mask=mask)
    plain = -select(log_probs, mask)
    loss = plain if weights is None else plain * select(weights.detach(), mask)
    return loss, {"nll": plain.detach()}


def message_weights(weights: Tensor, message_lengths: Lengths, num_tokens: int) -> Tensor:
    """Give each token the weight of its message.

    Args:
        weights: `[num_messages]` over all samples, in order.
        message_lengths: tokens of each message; they sum to `num_tokens`.

    Raises:
        ValueError: a weight is negative or not finite, or the lengths do not fit.
    """
    if bool((~torch.isfinite(weights) | (weights < 0)).any()):
        raise ValueError(f"message weights must be finite and not negative, got {weights.tolist()}")
    return repeat_per_token(weights, message_lengths, num_tokens)
