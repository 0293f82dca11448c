"""A train shard as tensors, and its cut into optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from limes.algorithms.estimators import EstimatorInputs, EstimatorSettings, estimate
from limes.records import Sample, TrainShard


@dataclass
class TrainBatch:
    """This rank's samples with one value a response token, samples end to end.

    Attributes:
        samples: in the order of the tensors.
        lengths: response tokens of each.
        mask: `[T]`, 1 on trained tokens.
        advantages: `[T]` float32.
        rollout_log_probs: `[T]` float32, the engine's.
        old_log_probs: `[T]` float32, of the policy before this rollout's first step; None while it is the current.
    """

    samples: list[Sample]
    lengths: list[int]
    mask: Tensor
    advantages: Tensor
    rollout_log_probs: Tensor
    old_log_probs: Tensor | None = None

    @property
    def has_signal(self) -> bool:
        """Some trained token has an advantage."""
        return bool((self.advantages[self.mask != 0] != 0).any())

    def select(self, indices: Sequence[int]) -> TrainBatch:
        """The samples at `indices`, in that order."""
        starts = [0]
        for length in self.lengths:
            starts.append(starts[-1] + length)
        tokens = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in indices]).to(self.mask.device)
        return TrainBatch(
            samples=[self.samples[i] for i in indices],
            lengths=[self.lengths[i] for i in indices],
            mask=self.mask[tokens],
            advantages=self.advantages[tokens],
            rollout_log_probs=self.rollout_log_probs[tokens],
            old_log_probs=None if self.old_log_probs is None else self.old_log_probs[tokens],
        )


def make_batch(shard: TrainShard, estimator: str, settings: EstimatorSettings, device: torch.device) -> TrainBatch:
    """Tensors of a shard, advantages included.

    Group statistics come from the rewards of the whole rollout, so they do not depend on the cut into shards.
    """
    lengths = [sample.response_length for sample in shard.samples]
    mask = torch.tensor([m for sample in shard.samples for m in sample.loss_mask], device=device)
    inputs = EstimatorInputs(
        rewards=shard.rewards,
        group_ids=shard.group_ids,
        lengths=lengths,
        mask=mask,
        partition=shard.partition,
        valid=[num > 0 for num in shard.num_trained_tokens],
    )
    advantages, _ = estimate(estimator, inputs, settings)
    log_probs = [value for sample in shard.samples for value in sample.rollout_log_probs]
    return TrainBatch(
        samples=shard.samples,
        lengths=lengths,
        mask=mask,
        advantages=advantages.to(device),
        rollout_log_probs=torch.tensor(log_probs, dtype=torch.float32, device=device),
    )


def optimizer_steps(shard: TrainShard, num_steps: int) -> list[tuple[list[int], list[int]]]:
    """Cut a rollout into optimizer steps by global position.

    Returns:
        For each step: indices into `shard.samples`, and the trained tokens of all its samples on all ranks. Steps in
        which nothing trains anywhere are left out.
    """
    num_samples = len(shard.num_trained_tokens)
    bounds = [round(i * num_samples / num_steps) for i in range(num_steps + 1)]
    steps = []
    for start, end in pairwise(bounds):
        own = [i for i, position in enumerate(shard.partition) if start <= position < end]
        trained = [num for num in shard.num_trained_tokens[start:end] if num > 0]
        if trained:
            steps.append((own, trained))
    return steps


def step_total(trained_tokens: Sequence[int], how: str) -> float:
    """Denominator of an optimizer step: its trained tokens for `token_mean`, its trained sequences otherwise."""
    return float(sum(trained_tokens)) if how == "token_mean" else float(len(trained_tokens))
