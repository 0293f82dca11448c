"""The train worker: turns graded samples into optimizer steps."""

from __future__ import annotations

import gc
import math
import time
from pathlib import Path
from typing import Protocol

import torch

from limes.algorithms.estimators import EstimatorSettings
from limes.config import Config
from limes.models.policy import Policy, enable_checkpointing
from limes.records import TrainShard
from limes.run import TrainRecord, write_train_records
from limes.training import checkpoint
from limes.training.batch import TrainBatch, make_batch, optimizer_steps
from limes.training.forward import PackedForward
from limes.training.optimizer import PolicyOptimizer
from limes.training.packing import cut_micro_batches
from limes.training.schedule import learning_rate
from limes.training.step import StepMetrics, gradient_step


class SharedWeightsEngine(Protocol):
    """An engine that reads the trained tensors themselves."""

    async def set_weight_version(self, version: int) -> None:
        """The tensors have changed."""
        ...


class TrainWorker:
    """Owns the optimizer of a policy on one device.

    Args:
        policy: what is trained, in place.
        engine: samples with the same tensors.
        samples_folder: where training records go; None writes none.

    Attributes:
        weight_version: how often the weights were handed to the engine.
        num_steps_done: optimizer steps so far; the schedule's clock.
    """

    def __init__(
        self, policy: Policy, config: Config, *, engine: SharedWeightsEngine, samples_folder: Path | None = None
    ) -> None:
        self.policy, self.config = policy, config
        self._engine, self._samples_folder = engine, samples_folder
        self.weight_version = 0
        self.num_steps_done = 0
        self.optimizer = PolicyOptimizer(policy.model.named_parameters(), config.trainer)
        if config.trainer.gradient_checkpointing:
            enable_checkpointing(policy.model)
        self._forward = PackedForward(
            policy,
            temperature=config.rollout.temperature,
            head_chunk=config.trainer.head_chunk,
            share_prefixes=config.trainer.share_prefixes,
            entropy_grad=config.algorithm.entropy_coef != 0,
        )

    def train(self, rollout_id: int, shard: TrainShard) -> dict[str, float]:
        """Train on one rollout; returns metrics.

        Without a signal (all advantages 0 and no entropy bonus) nothing is computed and nothing moves, momentum
        included; `train/skipped` is then 1.
        """
        started = time.perf_counter()
        batch = self._make_batch(shard)
        if not (batch.has_signal or self.config.algorithm.entropy_coef):
            self._write_records(rollout_id, batch)
            return {"train/skipped": 1.0, "train/lr": self._learning_rate()}
        steps = optimizer_steps(shard, self.config.trainer.num_steps_per_rollout)
        if len(steps) > 1:
            batch.old_log_probs = self._log_probs(batch)
        metrics = StepMetrics()
        for own, trained_tokens in steps:
            part = batch.select(own)
            micro_batches = [part.select(indices) for indices in self._cut(part)]
            gradient_step(micro_batches, self._forward, self.optimizer, self.config, trained_tokens, metrics)
            self._optimizer_step(metrics)
        self._write_records(rollout_id, batch, metrics)
        return metrics.summary(time.perf_counter() - started)

    async def update_weights(self) -> int:
        """Tell the engine that its weights have changed; returns their version. No byte moves."""
        self.weight_version += 1
        await self._engine.set_weight_version(self.weight_version)
        return self.weight_version

    def clear_memory(self) -> None:
        """Give freed memory back to the device."""
        gc.collect()
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()

    def save_model(self, rollout_id: int, folder: Path, force_sync: bool = False) -> None:
        """Write model, tokenizer, optimizer and schedule into a checkpoint folder. It is on the disk on return."""
        state = {"num_steps_done": self.num_steps_done, "weight_version": self.weight_version}
        checkpoint.save(folder, self.policy, self.optimizer, state)

    def load(self, folder: Path) -> None:
        """Go on from what `save_model` wrote.

        Raises:
            ValueError: the folder is no checkpoint, or one of another model.
        """
        state = checkpoint.load(folder, self.policy, self.optimizer)
        self.num_steps_done, self.weight_version = state["num_steps_done"], state["weight_version"]

    def _make_batch(self, shard: TrainShard) -> TrainBatch:
        algorithm = self.config.algorithm
        settings = EstimatorSettings(std=algorithm.advantage_std, eps=algorithm.advantage_eps)
        return make_batch(shard, algorithm.advantage_estimator, settings, self.policy.device)

    def _cut(self, batch: TrainBatch) -> list[list[int]]:
        trainer = self.config.trainer
        tokens = [sample.tokens for sample in batch.samples]
        return cut_micro_batches(tokens, trainer.max_tokens_per_micro_batch, share=trainer.share_prefixes)

    @torch.no_grad()
    def _log_probs(self, batch: TrainBatch) -> torch.Tensor:
        """Log-probs of all tokens under the current policy."""
        found: dict[int, torch.Tensor] = {}
        for indices in self._cut(batch):
            part = batch.select(indices)
            found.update(zip(indices, self._forward(part.samples).log_probs.split(part.lengths), strict=True))
        return torch.cat([found[i] for i in range(len(batch.samples))])

    def _learning_rate(self) -> float:
        trainer = self.config.trainer
        total = (self.config.rollout.num_rollout or 0) * trainer.num_steps_per_rollout
        return learning_rate(self.num_steps_done, total, trainer)

    def _optimizer_step(self, metrics: StepMetrics) -> None:
        lr = self._learning_rate()
        norm = self.optimizer.step(lr)
        metrics.stepped(lr, norm)
        if math.isfinite(norm):
            self.num_steps_done += 1

    def _write_records(self, rollout_id: int, batch: TrainBatch, metrics: StepMetrics | None = None) -> None:
        if self._samples_folder is None:
            return
        computed = {} if metrics is None else metrics.log_probs
        old = [None] * len(batch.samples) if batch.old_log_probs is None else batch.old_log_probs.split(batch.lengths)
        advantages = batch.advantages.split(batch.lengths)
        records = [
            TrainRecord(
                index=sample.index,
                advantages=advantage.tolist(),
                old_log_probs=None if before is None else before.tolist(),
                log_probs=computed.get(sample.index),
            )
            for sample, advantage, before in zip(batch.samples, advantages, old, strict=True)
        ]
        write_train_records(self._samples_folder, rollout_id, records)
