"""A train shard as tensors, and its cut into optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from limes.algorithms.estimators import Estimator, EstimatorInputs, EstimatorSettings, estimate
from limes.algorithms.whitening import Moments
from limes.records import Sample, TrainShard, step_bounds
from limes.training.estimator import steps_of


@dataclass
class TrainBatch:
    """This rank's samples with one value a response token, samples end to end.

    Attributes:
        samples: in the order of the tensors.
        lengths: response tokens of each.
        loss_mask: `[T]`, 1 on tokens that the samples want trained.
        mask: `[T]`, 1 on tokens that are: those that also have an engine log-prob.
        advantages: `[T]` float32; for given answers the weights of their messages.
        rollout_log_probs: `[T]` float32, the engine's; NaN where there is none.
        old_log_probs: `[T]`, of the policy before this rollout's first step; None while it is the current.
        ref_log_probs: `[T]`, of the reference; None without one.
        teacher_log_probs: `[T]`, of the teacher; None without one.
    """

    samples: list[Sample]
    lengths: list[int]
    loss_mask: Tensor
    mask: Tensor
    advantages: Tensor
    rollout_log_probs: Tensor
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    teacher_log_probs: Tensor | None = None

    @property
    def has_signal(self) -> bool:
        """Some trained token has an advantage."""
        return bool((self.advantages[self.mask != 0] != 0).any())

    @property
    def num_missing(self) -> int:
        """Tokens that would train if they had an engine log-prob."""
        return int(((self.loss_mask != 0) & (self.mask == 0)).sum())

    def select(self, indices: Sequence[int]) -> TrainBatch:
        """The samples at `indices`, in that order."""
        starts = [0]
        for length in self.lengths:
            starts.append(starts[-1] + length)
        places = [torch.arange(starts[i], starts[i + 1]) for i in indices]
        tokens = torch.cat([torch.empty(0, dtype=torch.int64), *places]).to(self.mask.device)
        return TrainBatch(
            samples=[self.samples[i] for i in indices],
            lengths=[self.lengths[i] for i in indices],
            loss_mask=self.loss_mask[tokens],
            mask=self.mask[tokens],
            advantages=self.advantages[tokens],
            rollout_log_probs=self.rollout_log_probs[tokens],
            old_log_probs=_at(self.old_log_probs, tokens),
            ref_log_probs=_at(self.ref_log_probs, tokens),
            teacher_log_probs=_at(self.teacher_log_probs, tokens),
        )


def make_batch(
    shard: TrainShard,
    estimator: str | Estimator,
    settings: EstimatorSettings,
    device: torch.device,
    *,
    kl: Tensor | None = None,
    values: Tensor | None = None,
    merge: Callable[[Moments], Moments] = lambda own: own,
) -> TrainBatch:
    """Tensors of a shard, advantages included.

    Group statistics come from the rewards of the whole rollout, so they do not depend on the cut into shards.

    Args:
        kl: `[T]` KL of the policy to the reference, for estimators that have it in their reward.
        values: `[T]` of the critic.
        merge: from this rank's moments to those of all, for whitening.
    """
    loss_mask, mask, rollout_log_probs = token_masks(shard, device)
    inputs = estimator_inputs(shard, mask, kl=kl, values=values)
    advantages, _ = estimate(estimator, inputs, settings, merge=merge)
    return TrainBatch(shard.samples, list(inputs.lengths), loss_mask, mask, advantages.to(device), rollout_log_probs)


def estimator_inputs(
    shard: TrainShard, mask: Tensor, *, kl: Tensor | None = None, values: Tensor | None = None
) -> EstimatorInputs:
    """What an estimator gets of a shard; arguments as in `make_batch`."""
    return EstimatorInputs(
        rewards=shard.rewards,
        group_ids=shard.group_ids,
        lengths=[sample.response_length for sample in shard.samples],
        mask=mask,
        partition=shard.partition,
        valid=[num > 0 for num in shard.num_trained_tokens],
        kl=kl,
        values=values,
        steps=steps_of(shard.samples),
    )


def token_masks(shard: TrainShard, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """`TrainBatch.loss_mask`, `mask` and `rollout_log_probs` of a shard. Actor and critic train on the same tokens."""
    loss_mask = trained_mask(shard, device)
    rollout_log_probs = engine_log_probs(shard.samples).to(device)
    return loss_mask, loss_mask * rollout_log_probs.isfinite(), rollout_log_probs


def trained_mask(shard: TrainShard, device: torch.device) -> Tensor:
    """`[T]`, 1 on tokens that the shard's samples want trained; all 0 for a sample that is outside training."""
    trains = [shard.num_trained_tokens[position] > 0 for position in shard.partition]
    marks = [m * t for sample, t in zip(shard.samples, trains, strict=True) for m in sample.loss_mask]
    return torch.tensor(marks, dtype=torch.int64, device=device)


def _at(values: Tensor | None, tokens: Tensor) -> Tensor | None:
    return None if values is None else values[tokens]


def engine_log_probs(samples: Sequence[Sample]) -> Tensor:
    """`[T]` float32; NaN where the engine gave none, or none that is a finite number."""
    found: list[float | None] = []
    for sample in samples:
        found += sample.rollout_log_probs or [None] * sample.response_length
    return torch.tensor([math.nan if value is None else value for value in found], dtype=torch.float32)


def optimizer_steps(shard: TrainShard, num_steps: int) -> list[tuple[list[int], list[int]]]:
    """Cut a rollout into optimizer steps by global position.

    Returns:
        For each step: indices into `shard.samples`, and the trained tokens of all its samples on all ranks. Steps in
        which nothing trains anywhere are left out.
    """
    num_samples = len(shard.num_trained_tokens)
    steps = []
    for start, end in pairwise(step_bounds(num_samples, num_steps)):
        own = [i for i, position in enumerate(shard.partition) if start <= position < end]
        trained = [num for num in shard.num_trained_tokens[start:end] if num > 0]
        if trained:
            steps.append((own, trained))
    return steps
