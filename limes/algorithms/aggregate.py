"""From token losses to the one number that is optimised.

Every way divides by a `total` that is counted once over the whole optimizer step. Parts of the step, cut in any way
into micro-batches and ranks, each call `aggregate` with that same total, and their results and gradients add up to
those of the whole. A mean of per-part means does not.

With T the masked-in tokens of a sequence, m the mask and L the token losses:

===============  ============================================  ======================================================
how              value                                         used by
===============  ============================================  ======================================================
token_mean       sum(m L) / tokens                             DAPO (arXiv:2503.14476, eq. 8)
sequence_mean    sum over sequences of sum(m L) / T, / seqs    GRPO (arXiv:2402.03300, eq. 3), GSPO (arXiv:2507.18071)
sequence_sum     sum(m L) / sequences                          RLOO (arXiv:2402.14740), the policy gradient as derived
constant         sum(m L) / constant / sequences               Dr.GRPO (arXiv:2503.20783), constant = longest answer
===============  ============================================  ======================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from limes.algorithms.choices import choose
from limes.algorithms.packed import Lengths, as_lengths, check_packed, repeat_per_token, select, trained_lengths


def aggregate(
    losses: Tensor,
    mask: Tensor,
    lengths: Lengths,
    how: str = "token_mean",
    *,
    total: Tensor | float | None = None,
    constant: float | None = None,
    sequence_tokens: Tensor | None = None,
) -> Tensor:
    """Scalar loss of this part of an optimizer step.

    Args:
        losses: `[num_tokens]` per-token losses, any float dtype. What stands under the mask is never read.
        mask: `[num_tokens]`, not 0 on trained tokens.
        lengths: tokens of each sequence; they sum to `num_tokens`.
        how: `token_mean`, `sequence_mean`, `sequence_sum` or `constant`; see the table above.
        total: tokens (`token_mean`) or sequences (all others) of the whole step, from `step_total`; None says that this
            call is the whole step.
        constant: divisor of `constant`, which alone reads it.
        sequence_tokens: `[num_sequences]` trained tokens by which `sequence_mean` divides each sequence, where that is
            not its own count in this call: the whole sequence when context parallelism cut it, or the whole rollout
            when several sequences share one.

    Returns:
        A scalar in the dtype of `losses`. When nothing is masked in, 0 with a gradient of zeros.

    Raises:
        ValueError: unknown `how`, `constant` without its divisor, shapes that disagree.
    """
    check_packed(losses=losses, mask=mask)
    weigh = choose(_WEIGHTS, how, "aggregation")
    if total is None:
        total = step_total(mask, lengths, how)
    if sequence_tokens is None:
        sequence_tokens = trained_lengths(mask, lengths)
    weighted = weigh(select(losses, mask), lengths, sequence_tokens, constant)
    return weighted.sum() / torch.as_tensor(total, device=losses.device).clamp(min=1).to(losses.dtype)


def step_total(mask: Tensor, lengths: Lengths, how: str = "token_mean", *, count_empty: bool = False) -> Tensor:
    """The part of `total` that these sequences bring, a float64 scalar; sum it over the parts of an optimizer step.

    Args:
        mask: `[num_tokens]`, not 0 on trained tokens. Give the mask without rejected tokens to leave them out of the
            denominator, or the mask with them to keep them in.
        lengths: tokens of each sequence.
        how: as in `aggregate`.
        count_empty: also count sequences without a trained token. By default they are outside every statistic.
    """
    count = choose(_COUNTS, how, "aggregation")
    return count(trained_lengths(mask, lengths), count_empty).double()


def _per_sequence_mean(losses: Tensor, lengths: Lengths, sequence_tokens: Tensor, _constant: float | None) -> Tensor:
    divisors = sequence_tokens.clamp(min=1).to(losses.dtype)
    return losses / repeat_per_token(divisors, lengths, losses.numel())


def _plain(losses: Tensor, lengths: Lengths, _sequence_tokens: Tensor, _constant: float | None) -> Tensor:
    as_lengths(lengths, losses.numel(), losses.device)
    return losses


def _over_constant(losses: Tensor, lengths: Lengths, _sequence_tokens: Tensor, constant: float | None) -> Tensor:
    if constant is None or constant <= 0:
        raise ValueError(
            f"aggregation 'constant' with constant={constant}: give a number above 0, like max_response_len"
        )
    return losses / constant


def _count_tokens(trained: Tensor, _count_empty: bool) -> Tensor:
    return trained.sum()


def _count_sequences(trained: Tensor, count_empty: bool) -> Tensor:
    return torch.as_tensor(trained.numel()) if count_empty else (trained > 0).sum()


_WEIGHTS: Mapping[str, Callable[[Tensor, Lengths, Tensor, float | None], Tensor]] = MappingProxyType(
    {
        "token_mean": _plain,
        "sequence_mean": _per_sequence_mean,
        "sequence_sum": _plain,
        "constant": _over_constant,
    }
)
_COUNTS: Mapping[str, Callable[[Tensor, bool], Tensor]] = MappingProxyType(
    {
        "token_mean": _count_tokens,
        "sequence_mean": _count_sequences,
        "sequence_sum": _count_sequences,
        "constant": _count_sequences,
    }
)
AGGREGATIONS = tuple(_WEIGHTS)
"""Names that `aggregate` knows."""
