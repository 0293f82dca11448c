"""One optimizer step's gradient, summed over micro-batches, and its metrics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from limes.algorithms.metrics import Part, effective_sample_size, merge, quantile, reduce_tokens, weight_sums
from limes.training.batch import TrainBatch
from limes.training.forward import PackedForward, TokenOutputs
from limes.training.objective import BatchLoss, Objective, StepTotal
from limes.training.optimizer import PolicyOptimizer
from limes.training.ranks import Ranks


class StepMetrics:
    """Gathers what the steps of a rollout have to report.

    Attributes:
        log_probs: trainer log-probs by sample index, from the pass that was trained on.
    """

    def __init__(self) -> None:
        self.log_probs: dict[int, list[float]] = {}
        self._parts: dict[str, Part] = {}
        self._losses: list[float] = [0.0]
        self._gaps: list[Tensor] = []
        self._importance = torch.zeros(3, dtype=torch.float64)
        self._norms: list[float] = []
        self._lr = 0.0
        self._num_tokens = 0
        self._num_computed = 0

    @property
    def num_steps(self) -> int:
        """Optimizer steps so far."""
        return len(self._norms)

    def micro_batch(self, batch: TrainBatch, outputs: TokenOutputs, part: BatchLoss) -> None:
        """Record one forward and backward pass."""
        self._parts = merge([self._parts, part.metrics])
        self._gaps.append(part.log_prob_gaps)
        self._importance += weight_sums(part.importance, torch.ones_like(part.importance)).cpu()
        self._losses[-1] += float(part.loss.detach())
        self._num_tokens += sum(len(sample.tokens) for sample in batch.samples)
        self._num_computed += outputs.num_computed
        for sample, values in zip(batch.samples, outputs.log_probs.detach().split(batch.lengths), strict=True):
            self.log_probs[sample.index] = values.tolist()

    def over(self, ranks: Ranks) -> StepMetrics:
        """Those of all data-parallel ranks together; records stay with the rank that has the sample."""
        if ranks.is_alone:
            return self
        whole = StepMetrics()
        whole._norms, whole._lr, whole._losses = self._norms, self._lr, [0.0] * len(self._losses)
        parts = {name: Part(part.value.cpu(), part.count.cpu(), part.is_max) for name, part in self._parts.items()}
        own = (parts, self._losses, [gaps.cpu() for gaps in self._gaps], self._importance)
        for parts, losses, gaps, importance in ranks.gather(own):
            whole._parts = merge([whole._parts, parts])
            whole._losses = [a + b for a, b in zip(whole._losses, losses, strict=True)]
            whole._gaps += gaps
            whole._importance += importance
        counts = ranks.sum(torch.tensor([self._num_tokens, self._num_computed]))
        whole._num_tokens, whole._num_computed = (int(num) for num in counts)
        return whole

    def stepped(self, lr: float, norm: float) -> None:
        """Record an optimizer step; `norm` is the gradient's before clipping."""
        self._lr = lr
        self._norms.append(norm)
        self._losses.append(0.0)

    def summary(self, seconds: float) -> dict[str, float]:
        """Plain numbers: token metrics over all trained tokens of the rollout, loss and norm as means over steps."""
        values = {f"train/{name}": part.result for name, part in self._parts.items()}
        values |= _gap_metrics(torch.cat(self._gaps))
        values["train/ess"] = effective_sample_size(self._importance)
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


def _gap_metrics(gaps: Tensor) -> dict[str, float | None]:
    """|trainer - engine log-prob| over all trained tokens of the rollout."""
    everywhere = torch.ones_like(gaps)
    parts = reduce_tokens({"logprob_abs_diff": gaps, "logprob_abs_diff_max": gaps}, everywhere)
    values = {f"train/{name}": part.result for name, part in parts.items()}
    return values | {"train/logprob_abs_diff_p99": quantile(gaps, everywhere, 0.99)}


def gradient_step(
    micro_batches: Sequence[TrainBatch],
    forward: PackedForward,
    optimizer: PolicyOptimizer,
    objective: Objective,
    total: StepTotal,
    metrics: StepMetrics,
) -> None:
    """Add up the gradient of one optimizer step.

    The denominator, `total`, is that of every sample of the step on every rank, so the cut into micro-batches changes
    neither loss nor gradient. An empty micro-batch takes part in what the ranks compute together.
    """
    for batch in micro_batches:
        if not batch.samples:
            forward.idle().backward()
            optimizer.accumulate()
            continue
        outputs = forward(batch.samples)
        part = objective(batch, outputs, total)
        part.loss.backward()
        optimizer.accumulate()
        metrics.micro_batch(batch, outputs, part)
