"""The train worker: turns graded samples into optimizer steps."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from limes.algorithms import distill
from limes.config import Config
from limes.models.policy import Policy, enable_checkpointing
from limes.records import TrainShard
from limes.run import TrainRecord, write_train_records
from limes.training import checkpoint
from limes.training.batch import TrainBatch, make_batch, optimizer_steps
from limes.training.estimator import build_estimator
from limes.training.forward import PackedForward
from limes.training.objective import Objective
from limes.training.optimizer import PolicyOptimizer
from limes.training.parallel.build import build_optimizer, weight_source
from limes.training.parallel.models import ranks_of
from limes.training.schedule import learning_rate
from limes.training.scores import TokenScorer
from limes.training.sft import SftObjective, sft_batch
from limes.training.step import StepMetrics, gradient_step
from limes.weights.source import WeightSource


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
        self.ranks = ranks_of(policy)
        self.optimizer: PolicyOptimizer = build_optimizer(policy, config.trainer)
        if config.trainer.gradient_checkpointing:
            enable_checkpointing(policy.model)
        self._forward = PackedForward(
            policy,
            temperature=config.rollout.temperature,
            head_chunk=config.trainer.head_chunk,
            share_prefixes=config.trainer.share_prefixes,
            entropy_grad=config.algorithm.entropy_coef != 0,
        )
        self._objective = SftObjective(config) if config.algorithm.is_supervised else Objective(config)
        self._estimator, self._estimator_settings = build_estimator(config.algorithm)
        needs_old = self._objective.needs_old_log_probs(config.trainer.num_steps_per_rollout)
        self._scorer = TokenScorer(policy, config, self._forward, needs_old=needs_old)
        self._reference = self._scorer.reference

    def train(
        self, rollout_id: int, shard: TrainShard, external_data: Mapping[str, Any] | None = None
    ) -> dict[str, float]:
        """Train on one rollout; returns metrics.

        Without a signal (all advantages 0, and no entropy bonus or KL in the loss) nothing is computed and nothing
        moves, momentum included; `train/skipped` is then 1.

        Args:
            external_data: `values`, per sample the critic's, one number a response token.
        """
        started = time.perf_counter()
        batch = self._make_batch(rollout_id, shard, external_data)
        metrics = StepMetrics()
        if self._objective.always_trains or self.ranks.any(batch.has_signal):
            for own, trained_tokens in optimizer_steps(shard, self.config.trainer.num_steps_per_rollout):
                part = batch.select(own)
                total = self._objective.total(trained_tokens, part, self.ranks.sum)
                if total.tokens == 0:
                    continue
                micro_batches = [part.select(indices) for indices in self._cut(part)]
                gradient_step(micro_batches, self._forward, self.optimizer, self._objective, total, metrics)
                self._optimizer_step(metrics)
        if self._reference is not None:
            self._reference.rollout_done(rollout_id)
        self._write_records(rollout_id, batch, metrics)
        report = {"train/missing_log_probs": float(self.ranks.sum(torch.tensor(batch.num_missing)))}
        if not metrics.num_steps:
            return report | {"train/skipped": 1.0, "train/lr": self._learning_rate()}
        return report | metrics.over(self.ranks).summary(time.perf_counter() - started)

    def compute_kl(self, rollout_id: int, shard: TrainShard) -> dict[str, list[list[float]]]:
        """`kl`: per sample the KL to the reference that is in the reward, one number a response token.

        For a critic that trains on the rollout before this worker does; `train` then scores nothing again.
        """
        scores = self._scorer.score(rollout_id, shard.samples)
        assert scores.kl is not None, "no KL in the reward"
        return {"kl": [values.tolist() for values in scores.kl.split([s.response_length for s in shard.samples])]}

    async def update_weights(self) -> int:
        """Tell the engine that its weights have changed; returns their version. No byte moves."""
        self.weight_version += 1
        await self._engine.set_weight_version(self.weight_version)
        return self.weight_version

    def weight_source(self) -> WeightSource:
        """The weights as they are now, for engines in other processes; on many ranks each has to read it."""
        return weight_source(self.policy)

    def clear_memory(self) -> None:
        """Give freed memory back to the device."""
        gc.collect()
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()

    def save_model(self, rollout_id: int, folder: Path, force_sync: bool = False) -> None:
        """Write model, tokenizer, optimizer and schedule into a checkpoint folder. It is on the disk on return."""
        state = {"num_steps_done": self.num_steps_done, "weight_version": self.weight_version}
        checkpoint.save(folder, self.policy, self.optimizer, state)
        if self._reference is not None:
            self._reference.save(folder)

    def load(self, folder: Path) -> None:
        """Go on from what `save_model` wrote.

        Raises:
            ValueError: the folder is no checkpoint, or one of another model.
        """
        if self._reference is not None:
            self._reference.load(folder)
        state = checkpoint.load(folder, self.policy, self.optimizer)
        self.num_steps_done, self.weight_version = state["num_steps_done"], state["weight_version"]

    def _make_batch(self, rollout_id: int, shard: TrainShard, external_data: Mapping[str, Any] | None) -> TrainBatch:
        if self.config.algorithm.is_supervised:
            return sft_batch(shard, self.policy.device)
        scores = self._scorer.score(rollout_id, shard.samples)
        self._scorer.forget()
        values = None
        if external_data is not None:
            flat = [value for row in external_data["values"] for value in row]
            values = torch.tensor(flat, dtype=torch.float64, device=self.policy.device)
        batch = make_batch(
            shard,
            self._estimator,
            self._estimator_settings,
            self.policy.device,
            kl=scores.kl,
            values=values,
            merge=self.ranks.merge_moments,
        )
        batch.old_log_probs, batch.ref_log_probs = scores.old, scores.ref
        if scores.teacher is not None:
            assert scores.old is not None
            coef = self.config.teacher.opd_coef
            term = distill.advantage_term(scores.old, scores.teacher, coef=coef, mask=batch.mask)
            batch.advantages += term
            batch.teacher_log_probs = scores.teacher
        return batch

    def _cut(self, batch: TrainBatch) -> list[list[int]]:
        return self._forward.plan(batch.samples, self.config.trainer.max_tokens_per_micro_batch)

    def _learning_rate(self) -> float:
        trainer = self.config.trainer
        num_rollout = (self.config.rollout.num_rollout or 0) - self.config.critic.num_critic_only_steps
        total = num_rollout * trainer.num_steps_per_rollout
        return learning_rate(self.num_steps_done, total, trainer)

    def _optimizer_step(self, metrics: StepMetrics) -> None:
        if self._reference is not None:
            self._reference.before_step()
        lr = self._learning_rate()
        norm = self.optimizer.step(lr)
        metrics.stepped(lr, norm)
        if math.isfinite(norm):
            self.num_steps_done += 1

    def _write_records(self, rollout_id: int, batch: TrainBatch, metrics: StepMetrics) -> None:
        if self._samples_folder is None:
            return
        old = [None] * len(batch.samples) if batch.old_log_probs is None else batch.old_log_probs.split(batch.lengths)
        advantages = batch.advantages.split(batch.lengths)
        records = [
            TrainRecord(
                index=sample.index,
                advantages=advantage.tolist(),
                old_log_probs=None if before is None else before.tolist(),
                log_probs=metrics.log_probs.get(sample.index),
            )
            for sample, advantage, before in zip(batch.samples, advantages, old, strict=True)
        ]
        gathered = [record for own in self.ranks.gather(records) for record in own]
        if self.ranks.is_first:
            write_train_records(self._samples_folder, rollout_id, gathered)
