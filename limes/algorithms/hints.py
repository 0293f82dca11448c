"""Choosing among hint candidates: a teacher that saw one of several hints, for each of a student's answers.

Candidate tensors are `[num_candidates, num_tokens, ...]`, candidates in order of their hints' lengths, shortest first.
Samples may have fewer candidates than there is room for; `candidate_counts` says how many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from limes.algorithms.choices import choose
from limes.algorithms.packed import Lengths, repeat_per_token

NO_ID = -1
"""Fills top-k lists: an id that no token has. As a choice: the token's sample has no candidate."""


def overlap(student_ids: Tensor, teacher_ids: Tensor) -> Tensor:
    """How many ids of the student's top-k are in each candidate's.

    Args:
        student_ids: `[num_tokens, k]` int64; negative ids are no tokens.
        teacher_ids: `[num_candidates, num_tokens, k']` int64, each candidate's own top-k.

    Returns:
        `[num_candidates, num_tokens]` int64.
    """
    same = student_ids[None, :, :, None] == teacher_ids[:, :, None, :]
    return (same.any(-1) & (student_ids >= 0)).sum(-1)


def choose_candidates(
    student_ids: Tensor,
    teacher_ids: Tensor,
    candidate_counts: Tensor,
    lengths: Lengths,
    mask: Tensor,
    how: str = "sequence_optimal",
    *,
    span_ids: Tensor | None = None,
) -> Tensor:
    """The candidate that each token learns from.

    `shortest`: the first. `token_optimal`: the one with the largest overlap at the token. `sequence_optimal`: the one
    with the largest overlap summed over the masked-in tokens of the sample, or of the span where spans are given. The
    shorter hint wins a tie. (OpenClaw-RL, top-K selection.)

    Args:
        student_ids, teacher_ids: as in `overlap`.
        candidate_counts: `[num_samples]` int64, candidates that each sample has, at most `num_candidates`.
        lengths: tokens of each sample.
        mask: `[num_tokens]`, not 0 on trained tokens; others take no part in a sum and choose the first.
        how: one of the three.
        span_ids: `[num_tokens]` int64, equal inside a span and distinct between spans; None makes each sample one span.

    Returns:
        `[num_tokens]` int64, -1 where the sample has no candidate.

    Raises:
        ValueError: unknown `how`, or more candidates than there are.
    """
    pick = choose(_PICKS, how, "hint selection")
    num_candidates, num_tokens = teacher_ids.shape[:2]
    if candidate_counts.numel() and int(candidate_counts.max()) > num_candidates:
        raise ValueError(
            f"candidate_counts go up to {int(candidate_counts.max())}, but there are {num_candidates} candidates"
        )
    counts = repeat_per_token(candidate_counts, lengths, num_tokens)
    if span_ids is None:
        span_ids = repeat_per_token(torch.arange(candidate_counts.numel(), device=mask.device), lengths, num_tokens)
    common = torch.where(mask != 0, overlap(student_ids, teacher_ids), 0)
    exists = torch.arange(num_candidates, device=counts.device)[:, None] < counts
    choice = pick(torch.where(exists, common, -1), span_ids)
    return torch.where(counts > 0, choice, NO_ID)


def take(candidates: Tensor, choice: Tensor, fill: float = 0) -> Tensor:
    """The chosen candidate's entries, `[num_tokens, ...]`; `fill` where the choice is -1.

    Args:
        candidates: `[num_candidates, num_tokens, ...]`, any dtype.
        choice: `[num_tokens]`, from `choose_candidates`.
    """
    tokens = torch.arange(choice.numel(), device=choice.device)
    chosen = candidates[choice.clamp(min=0), tokens]
    missing = (choice < 0).reshape(-1, *[1] * (chosen.dim() - 1))
    return torch.where(missing, torch.as_tensor(fill, dtype=chosen.dtype, device=chosen.device), chosen)


def _first(common: Tensor, _span_ids: Tensor) -> Tensor:
    return torch.zeros_like(common[0])


def _per_token(common: Tensor, _span_ids: Tensor) -> Tensor:
    return _first_argmax(common)


def _per_span(common: Tensor, span_ids: Tensor) -> Tensor:
    _, span = span_ids.unique(return_inverse=True)
    num_spans = int(span.max()) + 1 if span.numel() else 0
    sums = torch.zeros(common.shape[0], num_spans, dtype=common.dtype, device=common.device).index_add(1, span, common)
    return _first_argmax(sums)[span]


def _first_argmax(scores: Tensor) -> Tensor:
    """argmax over candidates, the first of equals."""
    candidates = torch.arange(scores.shape[0], device=scores.device)[:, None]
    return torch.where(scores == scores.amax(0), candidates, scores.shape[0]).amin(0)


_PICKS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {"shortest": _first, "token_optimal": _per_token, "sequence_optimal": _per_span}
)
