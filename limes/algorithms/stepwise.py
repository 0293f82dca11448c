"""Step-wise advantages: a score for each step (turn) of an answer, compared with the same step of its siblings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from limes.algorithms.advantages import group_relative
from limes.algorithms.groups import Ids, Rewards, Valid, scored
from limes.algorithms.packed import Lengths, as_lengths, check_packed


def step_wise(
    step_scores: Rewards,
    step_samples: Ids,
    step_indices: Ids,
    step_spans: Tensor | Sequence[tuple[int, int]],
    group_ids: Ids,
    lengths: Lengths,
    mask: Tensor,
    *,
    outcomes: Rewards | None = None,
    outcome_coef: float = 1.0,
    std: str = "population",
    eps: float = 1e-6,
    singletons: str = "zero",
    valid: Valid = None,
) -> Tensor:
    """Advantages of tokens from scores of steps.

    Steps are compared in buckets: all steps with the same (group, step index). Inside a bucket the scores are treated
    as `group_relative` treats rewards: a bucket of equal scores gives exact zeros, and a bucket of one step follows
    `singletons`. Each token of a step's span gets the step's advantage; tokens in no span get 0.

    The step-wise estimator of OpenClaw-RL is `std="population"`, `singletons="raw"` with outcomes; there, raw scores
    then stand beside normalised ones, which is why `zero` is the default here.

    Args:
        step_scores: `[num_steps]`, a tensor or numbers; None and NaN are unscored and outside every statistic.
        step_samples: `[num_steps]` position of the sample that each step belongs to, 0 .. num_samples - 1.
        step_indices: `[num_steps]` number of the step inside its sample; what buckets are made of.
        step_spans: `[num_steps, 2]` first token of the step inside its sample's response, and one past its last.
        group_ids: `[num_samples]` integer ids.
        lengths: response tokens of each sample.
        mask: `[num_tokens]`, not 0 on trained tokens.
        outcomes: `[num_samples]` rewards of whole samples, added to each of their steps' scores times `outcome_coef`; a
            sample with an unscored outcome has unscored steps.
        outcome_coef: weight of the outcome in a step's score.
        std, eps, singletons: as in `group_relative`.
        valid: `[num_steps]`, false for steps outside every statistic.

    Returns:
        `[num_tokens]` float64, 0 under the mask.

    Raises:
        ValueError: lists that differ in length, a sample out of range, a span that is empty, outside its sample, or
            that overlaps another.
    """
    scores, counts_in = scored(step_scores, valid)
    scores, counts_in = scores.cpu(), counts_in.cpu()
    samples, indices, groups = _on_cpu(step_samples), _on_cpu(step_indices), _on_cpu(group_ids)
    spans = _on_cpu(step_spans).reshape(-1, 2)
    check_packed(step_scores=scores, step_samples=samples, step_indices=indices, step_spans=spans[:, 0])
    offsets = _check_spans(samples, spans, as_lengths(lengths, mask.numel(), samples.device))
    if outcomes is not None:
        outcome, outcome_valid = scored(outcomes, None)
        scores = scores + outcome_coef * outcome.cpu()[samples]
        counts_in = counts_in & outcome_valid.cpu()[samples]
    buckets = torch.stack([groups[samples], indices], dim=1).unique(dim=0, return_inverse=True)[1]
    advantages = group_relative(scores, buckets, std=std, eps=eps, valid=counts_in, singletons=singletons)
    return _paint(advantages, offsets + spans[:, 0], offsets + spans[:, 1], mask)


def _on_cpu(integers: Tensor | Sequence[Any]) -> Tensor:
    return torch.as_tensor(integers, dtype=torch.int64, device="cpu")


def _check_spans(samples: Tensor, spans: Tensor, lengths: Tensor) -> Tensor:
    """First packed token of each step's sample."""
    if samples.numel() and not bool(((samples >= 0) & (samples < lengths.numel())).all()):
        raise ValueError(f"step_samples must lie in 0 .. {lengths.numel() - 1}, got {samples.tolist()}")
    start, end = spans.unbind(1)
    wrong = (start < 0) | (end <= start) | (end > lengths[samples])
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        raise ValueError(
            f"step {i}: span {spans[i].tolist()} does not fit the {int(lengths[samples[i]])} tokens of its sample"
        )
    return (lengths.cumsum(0) - lengths)[samples]


def _paint(advantages: Tensor, starts: Tensor, ends: Tensor, mask: Tensor) -> Tensor:
    widths = ends - starts
    begins = (starts - (widths.cumsum(0) - widths)).repeat_interleave(widths)
    tokens = begins + torch.arange(begins.numel())
    if tokens.unique().numel() != tokens.numel():
        raise ValueError("step_spans of one sample overlap: a token would belong to two steps")
    painted = torch.zeros(mask.numel(), dtype=torch.float64)
    painted = painted.index_copy(0, tokens, advantages.double().repeat_interleave(widths)).to(mask.device)
    return torch.where(mask != 0, painted, 0.0)
