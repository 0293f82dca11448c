"""One optimizer step's gradient, summed over micro-batches, and its metrics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from limes.algorithms.aggregate import aggregate
from limes.algorithms.metrics import Part, merge, quantile, reduce_tokens
from limes.algorithms.objective import token_losses
from limes.config import Config
from limes.training.batch import TrainBatch, step_total
from limes.training.forward import PackedForward, TokenOutputs
from limes.training.optimizer import PolicyOptimizer


class StepMetrics:
    """Gathers what the steps of a rollout have to report.

    Attributes:
        log_probs: trainer log-probs by sample index, from the pass that was trained on.
    """

    def __init__(self) -> None:
        self.log_probs: dict[int, list[float]] = {}
        self._parts: dict[str, Part] = {}
        self._losses: list[float] = [0.0]
        self._differences: list[Tensor] = []
        self._norms: list[float] = []
        self._lr = 0.0
        self._num_tokens = 0
        self._num_computed = 0

    def micro_batch(self, batch: TrainBatch, outputs: TokenOutputs, loss: Tensor, metrics: dict[str, Tensor]) -> None:
        """Record one forward and backward pass."""
        log_probs = outputs.log_probs.detach()
        difference = (log_probs - batch.rollout_log_probs).abs()
        metrics = metrics | {"logprob_abs_diff": difference, "logprob_abs_diff_max": difference}
        self._parts = merge([self._parts, reduce_tokens(metrics, batch.mask)])
        self._differences.append(difference[batch.mask != 0])
        self._losses[-1] += float(loss.detach())
        self._num_tokens += sum(len(sample.tokens) for sample in batch.samples)
        self._num_computed += outputs.num_computed
        for sample, values in zip(batch.samples, log_probs.split(batch.lengths), strict=True):
            self.log_probs[sample.index] = values.tolist()

    def stepped(self, lr: float, norm: float) -> None:
        """Record an optimizer step; `norm` is the gradient's before clipping."""
        self._lr = lr
        self._norms.append(norm)
        self._losses.append(0.0)

    def summary(self, seconds: float) -> dict[str, float]:
        """Plain numbers: token metrics over all trained tokens of the rollout, loss and norm as means over steps."""
        values = {f"train/{name}": part.result for name, part in self._parts.items()}
        differences = torch.cat(self._differences)
        values["train/logprob_abs_diff_p99"] = quantile(differences, torch.ones_like(differences), 0.99)
        finite = [norm for norm in self._norms if norm < float("inf")]
        values |= {
            "train/loss": sum(self._losses) / len(self._norms),
            "train/grad_norm": sum(finite) / len(finite) if finite else float("nan"),
            "train/nonfinite_grads": float(len(self._norms) - len(finite)),
            "train/lr": self._lr,
            "perf/train_time_s": seconds,
            "perf/train_tokens_per_s": self._num_tokens / seconds,
            "perf/train_shared_frac": 1 - self._num_computed / self._num_tokens,
        }
        return {name: value for name, value in values.items() if value is not None}


def gradient_step(
    micro_batches: Sequence[TrainBatch],
    forward: PackedForward,
    optimizer: PolicyOptimizer,
    config: Config,
    trained_tokens: Sequence[int],
    metrics: StepMetrics,
) -> None:
    """Add up the gradient of one optimizer step.

    The denominator comes from `trained_tokens`, the counts of every sample of the step on every rank, so the cut into
    micro-batches changes neither loss nor gradient.
    """
    total = step_total(trained_tokens, config.algorithm.aggregation)
    for batch in micro_batches:
        outputs = forward(batch.samples)
        loss, token_metrics = batch_loss(batch, outputs, config, total)
        loss.backward()
        optimizer.accumulate()
        metrics.micro_batch(batch, outputs, loss, token_metrics)


def batch_loss(
    batch: TrainBatch, outputs: TokenOutputs, config: Config, total: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's part of the step's loss, and metrics a token."""
    algorithm = config.algorithm
    old_log_probs = outputs.log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
    losses, metrics = token_losses(
        outputs.log_probs,
        old_log_probs,
        batch.advantages,
        lengths=batch.lengths,
        mask=batch.mask,
        policy_loss=algorithm.policy_loss,
        settings={
            "eps_clip": algorithm.eps_clip,
            "eps_clip_high": algorithm.eps_clip_high,
            "eps_clip_c": algorithm.eps_clip_c,
        },
        entropy=outputs.entropy,
        entropy_coef=algorithm.entropy_coef,
    )
    loss = aggregate(
        losses,
        batch.mask,
        batch.lengths,
        algorithm.aggregation,
        total=total,
        constant=algorithm.aggregation_constant or float(config.rollout.max_response_len),
    )
    return loss, metrics
