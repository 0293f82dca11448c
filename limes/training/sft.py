"""Supervised fine-tuning in the trainer: a shard of given answers as a batch, and their loss."""

from __future__ import annotations

import math

import torch

from limes.algorithms import sft
from limes.algorithms.metrics import reduce_tokens
from limes.data.conversations import MESSAGE_WEIGHT
from limes.records import TrainShard
from limes.training.batch import TrainBatch
from limes.training.forward import TokenOutputs
from limes.training.objective import BatchLoss, Objective, StepTotal


def sft_batch(shard: TrainShard, device: torch.device) -> TrainBatch:
    """Tensors of a shard of given answers: the advantage of a token is the weight of its message."""
    lengths = [sample.response_length for sample in shard.samples]
    marks = [mark for sample in shard.samples for mark in sample.loss_mask]
    mask = torch.tensor(marks, dtype=torch.int64, device=device)
    given = [float(sample.metadata.get(MESSAGE_WEIGHT, 1.0)) for sample in shard.samples]
    weights = sft.message_weights(torch.tensor(given, dtype=torch.float32, device=device), lengths, len(marks))
    no_engine = torch.full_like(weights, math.nan)
    return TrainBatch(shard.samples, lengths, mask, mask, weights, no_engine)


class SftObjective(Objective):
    """-weight x log-prob of each token, aggregated like every loss: weights do not enter the denominators."""

    def needs_old_log_probs(self, num_steps: int) -> bool:
        """There is no ratio."""
        return False

    def __call__(self, batch: TrainBatch, outputs: TokenOutputs, total: StepTotal) -> BatchLoss:
        """See `Objective.__call__`; nothing is compared with an engine."""
        losses, metrics = sft.negative_log_likelihood(outputs.log_probs, weights=batch.advantages, mask=batch.mask)
        parts = reduce_tokens(metrics | {"entropy": outputs.entropy}, batch.mask)
        nothing = outputs.log_probs.detach().new_empty(0)
        return BatchLoss(self._aggregate(losses, batch.mask, batch.lengths, total), parts, nothing, nothing)
