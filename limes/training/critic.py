"""The critic's worker: values for the actor, and optimizer steps towards the returns."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from limes.algorithms import value_loss
from limes.algorithms.aggregate import aggregate
from limes.algorithms.estimators import estimate
from limes.algorithms.metrics import Part, merge, reduce_tokens
from limes.algorithms.whitening import measure
from limes.config import Config
from limes.config.trainer import TrainerConfig
from limes.models.policy import enable_checkpointing
from limes.models.value_head import ValueModel
from limes.records import Sample, TrainShard
from limes.training import checkpoint
from limes.training.batch import estimator_inputs, optimizer_steps, token_masks
from limes.training.estimator import build_estimator
from limes.training.parallel.build import build_optimizer
from limes.training.parallel.models import ranks_of
from limes.training.ranks import Ranks
from limes.training.schedule import learning_rate
from limes.training.values import PackedValues


@dataclass(frozen=True)
class ValueTargets:
    """What this rank's values are to become: one tensor a sample, one number a response token.

    Attributes:
        masks: not 0 on trained tokens; under 0 nothing else is read.
        old_values: before this rollout's first step.
        returns: from rewards and old values.
    """

    samples: list[Sample]
    masks: list[Tensor]
    old_values: list[Tensor]
    returns: list[Tensor]


class CriticWorker:
    """Owns a critic and its optimizer on one device.

    Attributes:
        num_steps_done: optimizer steps so far; the schedule's clock.
    """

    def __init__(self, model: ValueModel, config: Config) -> None:
        self.model, self.config = model, config
        self.num_steps_done = 0
        self._trainer = critic_trainer(config)
        self.ranks = ranks_of(model)
        self.optimizer = build_optimizer(model, self._trainer)
        if config.trainer.gradient_checkpointing:
            enable_checkpointing(model.backbone)
        self._estimator, self._estimator_settings = build_estimator(config.algorithm)
        self._forward = PackedValues(model, share_prefixes=config.trainer.share_prefixes)
        self._report: dict[str, float] = {}
        self._latest: tuple[int, ValueTargets] | None = None

    def train(
        self, rollout_id: int, shard: TrainShard, external_data: Mapping[str, Any] | None = None
    ) -> dict[str, list[list[float]]]:
        """Train on one rollout.

        Args:
            external_data: `kl`, per sample the policy's KL to the reference, one number a response token, where the
                reward has a KL in it.

        Returns:
            `values`: for each sample of the shard one value a response token, by the weights as they were before.
        """
        started = time.perf_counter()
        targets = self._targets_of(rollout_id, shard, external_data)
        self._latest = None
        metrics = ValueMetrics(targets)
        for own, trained_tokens in optimizer_steps(shard, self.config.trainer.num_steps_per_rollout):
            total = float(sum(trained_tokens) - self._num_missing(shard, targets, own))
            if total == 0:
                continue
            for indices in self._cut([targets.samples[i] for i in own]):
                if indices:
                    value_backward(self._forward, targets, [own[i] for i in indices], total, self.config, metrics)
                else:
                    self._forward.idle().backward()
                self.optimizer.accumulate()
            self._optimizer_step(metrics)
        self._report = metrics.summary(time.perf_counter() - started, self.ranks)
        return {"values": [values.tolist() for values in targets.old_values]}

    def compute_values(
        self, rollout_id: int, shard: TrainShard, external_data: Mapping[str, Any] | None = None
    ) -> dict[str, list[list[float]]]:
        """What `train` gives, before it trains: for an actor that trains at the same time. `train` takes it from here.

        Args:
            external_data: see `train`.
        """
        targets = self._targets_of(rollout_id, shard, external_data)
        return {"values": [values.tolist() for values in targets.old_values]}

    def report(self) -> dict[str, float]:
        """Metrics of the latest `train`."""
        return self._report

    def clear_memory(self) -> None:
        """Give freed memory back to the device."""
        gc.collect()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def save_model(self, rollout_id: int, folder: Path, force_sync: bool = False) -> None:
        """Write network, optimizer and schedule into `critic/` of a checkpoint folder. It is on the disk on return."""
        own = folder / checkpoint.CRITIC
        self.model.save(own / checkpoint.MODEL)
        checkpoint.save_optimizer(own, self.optimizer)
        checkpoint.save_state(own, self.optimizer, {"num_steps_done": self.num_steps_done})

    def load(self, folder: Path) -> None:
        """Go on from what `save_model` wrote.

        Raises:
            ValueError: the folder has no critic in it, or another one.
        """
        own = folder / checkpoint.CRITIC
        with self.ranks.together(f"loading {own}"):
            checkpoint.refuse_incomplete(own)
        self.model.load(own / checkpoint.MODEL)
        checkpoint.load_optimizer(own, self.optimizer)
        self.num_steps_done = checkpoint.load_state(own)["num_steps_done"]

    def _targets_of(self, rollout_id: int, shard: TrainShard, external_data: Mapping[str, Any] | None) -> ValueTargets:
        if self._latest is None or self._latest[0] != rollout_id:
            kl = None if external_data is None else external_data["kl"]
            self._latest = rollout_id, self._targets(shard, kl)
        return self._latest[1]

    @torch.no_grad()
    def _targets(self, shard: TrainShard, kl: Sequence[Sequence[float]] | None) -> ValueTargets:
        assert (kl is not None) == bool(self.config.algorithm.kl_coef), "a reward with a KL in it needs the KL"
        device = self.model.device
        _, mask, _ = token_masks(shard, device)
        values = self._forward.score(shard.samples, self.config.trainer.max_tokens_per_micro_batch)
        flat_kl = (
            None if kl is None else torch.tensor([k for row in kl for k in row], dtype=values.dtype, device=device)
        )
        inputs = estimator_inputs(shard, mask, kl=flat_kl, values=values)
        merge = self.ranks.merge_moments
        _, returns = estimate(self._estimator, inputs, self._estimator_settings, merge=merge, dtype=values.dtype)
        cut = [list(tensor.split(inputs.lengths)) for tensor in (mask, values, returns)]
        return ValueTargets(shard.samples, *cut)

    def _num_missing(self, shard: TrainShard, targets: ValueTargets, own: Sequence[int]) -> int:
        """Tokens of a step, on all ranks, that would train if they had an engine log-prob."""
        training = (i for i in own if shard.num_trained_tokens[shard.partition[i]] > 0)
        missing = sum(sum(targets.samples[i].loss_mask) - int(targets.masks[i].count_nonzero()) for i in training)
        return int(self.ranks.sum(torch.tensor(missing)))

    def _cut(self, samples: Sequence[Sample]) -> list[list[int]]:
        return self._forward.plan(samples, self.config.trainer.max_tokens_per_micro_batch)

    def _optimizer_step(self, metrics: ValueMetrics) -> None:
        total = (self.config.rollout.num_rollout or 0) * self.config.trainer.num_steps_per_rollout
        lr = learning_rate(self.num_steps_done, total, self._trainer)
        norm = self.optimizer.step(lr)
        metrics.stepped(lr, norm)
        if math.isfinite(norm):
            self.num_steps_done += 1


class ValueMetrics:
    """Gathers what the steps of a rollout have to report."""

    def __init__(self, targets: ValueTargets) -> None:
        self._targets = targets
        self._parts: dict[str, Part] = {}
        self._norms: list[float] = []
        self._losses: list[float] = [0.0]
        self._lr: float | None = None

    def micro_batch(self, loss: Tensor, metrics: dict[str, Tensor], mask: Tensor) -> None:
        """Record one forward and backward pass."""
        self._losses[-1] += float(loss.detach())
        self._parts = merge([self._parts, reduce_tokens(metrics, mask)])

    def stepped(self, lr: float, norm: float) -> None:
        """Record an optimizer step; `norm` is the gradient's before clipping."""
        self._lr = lr
        self._norms.append(norm)
        self._losses.append(0.0)

    def summary(self, seconds: float, ranks: Ranks) -> dict[str, float]:
        """Plain numbers; what nothing was counted for is left out. Loss and norm are means over steps.

        All ranks make this call: tokens and losses are those of all of them.
        """
        own = {name: Part(part.value.cpu(), part.count.cpu(), part.is_max) for name, part in self._parts.items()}
        parts = merge(ranks.gather(own))
        loss = float(ranks.sum(torch.tensor(self._losses, dtype=torch.float64)).sum())
        finite = [norm for norm in self._norms if math.isfinite(norm)]
        num_steps = len(self._norms)
        clipped = parts.get("value_clipfrac")
        found = {
            "train/value_loss": loss / num_steps if num_steps else None,
            "train/value_clipfrac": None if clipped is None else clipped.result,
            "train/explained_variance": self._explained_variance(ranks),
            "train/critic_grad_norm": sum(finite) / len(finite) if finite else None,
            "train/critic_nonfinite_grads": float(num_steps - len(finite)),
            "train/critic_lr": self._lr,
            "perf/critic_time_s": seconds,
        }
        return {name: value for name, value in found.items() if value is not None}

    def _explained_variance(self, ranks: Ranks) -> float | None:
        targets, none = self._targets, torch.empty(0)
        old_values, returns, mask = (
            torch.cat(tensors or [none]) for tensors in (targets.old_values, targets.returns, targets.masks)
        )
        errors, all_returns = (ranks.merge_moments(measure(x, mask)) for x in (returns - old_values, returns))
        return value_loss.explained_variance(errors, all_returns)


def value_backward(
    forward: PackedValues,
    targets: ValueTargets,
    indices: Sequence[int],
    total: float,
    config: Config,
    metrics: ValueMetrics,
) -> None:
    """Add the gradient of one micro-batch, the samples at `indices`, to that of its step.

    The loss is the mean over the step's trained tokens, `total` of them on all ranks, so the cut into micro-batches
    changes neither loss nor gradient.
    """
    samples = [targets.samples[i] for i in indices]
    old_values, returns, mask = (
        torch.cat([tensors[i] for i in indices]) for tensors in (targets.old_values, targets.returns, targets.masks)
    )
    losses, token_metrics = value_loss.clipped(
        forward(samples), old_values, returns, value_clip=config.critic.value_clip, mask=mask
    )
    loss = aggregate(losses, mask, [s.response_length for s in samples], "token_mean", total=total)
    loss.backward()
    metrics.micro_batch(loss, token_metrics, mask)


def critic_trainer(config: Config) -> TrainerConfig:
    """The trainer's settings with the critic's own in their place."""
    names = ("lr", "lr_schedule", "lr_warmup_steps", "min_lr", "clip_grad")
    return config.trainer.model_copy(update={name: getattr(config.critic, name) for name in names})
