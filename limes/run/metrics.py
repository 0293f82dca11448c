"""Metric values that know how they add up, and the metrics whose reduction is fixed.

A metric is named `family/name`. While a step runs, its value is one of five small classes; parts of it, from
micro-batches, workers or ranks, are put together by `combine`, and `reduce` turns the whole into plain numbers. A mean
carries its count, so the mean of unequal parts is the mean of everything; a maximum stays a maximum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

FAMILIES = ("rollout", "train", "eval", "perf")


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean weighted by a count: `total` is the sum of what is averaged, `weight` how many there are."""

    total: float
    weight: float

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)

    @property
    def result(self) -> float | None:
        """The mean; None when nothing was counted."""
        return self.total / self.weight if self.weight else None


@dataclass(frozen=True, slots=True)
class Sum:
    """A count or amount that adds up."""

    value: float

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)

    @property
    def result(self) -> float:
        """The sum."""
        return self.value


@dataclass(frozen=True, slots=True)
class Max:
    """The largest of the parts; NaN if one of them is."""

    value: float

    def __add__(self, other: Max) -> Max:
        return self if self.value >= other.value or self.value != self.value else other

    @property
    def result(self) -> float:
        """The largest value."""
        return self.value


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest of the parts; NaN if one of them is."""

    value: float

    def __add__(self, other: Min) -> Min:
        return self if self.value <= other.value or self.value != self.value else other

    @property
    def result(self) -> float:
        """The smallest value."""
        return self.value


@dataclass(frozen=True, slots=True)
class Last:
    """The latest part; for what is the same everywhere, such as a learning rate."""

    value: float

    def __add__(self, other: Last) -> Last:
        return other

    @property
    def result(self) -> float:
        """The latest value."""
        return self.value


MetricValue = Mean | Sum | Max | Min | Last


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """How a metric is reduced, its unit, and what it says."""

    reduction: type[MetricValue]
    unit: str
    help: str


METRICS: Mapping[str, MetricInfo] = MappingProxyType(
    {
        "rollout/reward_mean": MetricInfo(Mean, "reward", "mean over the scored samples"),
        "rollout/reward_ci95": MetricInfo(Last, "reward", "half width of the 95% interval of the mean reward"),
        "rollout/truncated_frac": MetricInfo(Mean, "fraction", "samples that ran into the token limit"),
        "rollout/response_len_mean": MetricInfo(Mean, "tokens", "mean length of a response"),
        "rollout/grader_errors": MetricInfo(Sum, "samples", "samples whose grader failed; not the wrong answers"),
        "rollout/zero_std_frac": MetricInfo(Mean, "fraction", "groups whose rewards are all equal and move nothing"),
        "rollout/epoch": MetricInfo(Last, "epochs", "passes over the data that were behind the rollout's first sample"),
        "train/loss": MetricInfo(Mean, "", "policy loss"),
        "train/ppo_kl": MetricInfo(
            Mean, "nats per token", "KL of the policy at this step to the one before the rollout's first"
        ),
        "train/entropy": MetricInfo(Mean, "nats per token", "entropy of the policy"),
        "train/logprob_abs_diff": MetricInfo(Mean, "nats per token", "mean of |trainer - engine log-prob|"),
        "train/logprob_abs_diff_max": MetricInfo(Max, "nats", "maximum of |trainer - engine log-prob|"),
        "train/logprob_abs_diff_p99": MetricInfo(Last, "nats", "99th percentile of |trainer - engine log-prob|"),
        "train/missing_log_probs": MetricInfo(
            Sum, "tokens", "sampled tokens without a finite engine log-prob; they do not train"
        ),
        "train/ess": MetricInfo(
            Last, "fraction", "effective sample size of the importance weights, current policy over engine"
        ),
        "train/pg_loss": MetricInfo(Mean, "", "policy loss without KL and entropy terms"),
        "train/pg_clipfrac": MetricInfo(Mean, "fraction", "tokens whose ratio is clipped"),
        "train/pg_clipfrac_lower": MetricInfo(Mean, "fraction", "tokens that the dual clip bounds"),
        "train/ratio": MetricInfo(Mean, "", "ratio of the policy loss: current over old probability"),
        "train/ratio_max": MetricInfo(Max, "", "largest ratio of the policy loss"),
        "train/ppo_kl_k3": MetricInfo(Mean, "nats per token", "train/ppo_kl by the k3 estimate, never negative"),
        "train/behaviour_weight": MetricInfo(Mean, "", "decoupled PPO: proximal over engine probability"),
        "train/behaviour_weight_max": MetricInfo(Max, "", "largest train/behaviour_weight"),
        "train/kl_loss": MetricInfo(Mean, "nats per token", "KL in the loss, by its own estimate, without its weight"),
        "train/ref_kl": MetricInfo(Mean, "nats per token", "KL of the policy to the reference, by the k1 estimate"),
        "train/ref_kl_k3": MetricInfo(Mean, "nats per token", "KL of the policy to the reference, by the k3 estimate"),
        "train/tis": MetricInfo(Mean, "", "importance weight before the correction, trainer over engine"),
        "train/tis_max": MetricInfo(Max, "", "largest train/tis"),
        "train/tis_abs": MetricInfo(Mean, "", "distance of train/tis from 1"),
        "train/tis_clipfrac": MetricInfo(Mean, "fraction", "tokens that the correction clamps or rejects"),
        "train/correction_weight": MetricInfo(Mean, "", "weight that the correction gives to the policy loss"),
        "train/correction_weight_max": MetricInfo(Max, "", "largest train/correction_weight"),
        "train/rollout_kl": MetricInfo(Mean, "nats per token", "KL of engine to trainer, by the k1 estimate"),
        "train/rollout_kl_k3": MetricInfo(Mean, "nats per token", "KL of engine to trainer, by the k3 estimate"),
        "train/opsm_clipfrac": MetricInfo(Mean, "fraction", "tokens that off-policy sequence masking silences"),
        "train/opsm_kl": MetricInfo(Mean, "nats per token", "how far the policy has left an answer behind"),
        "train/teacher_kl": MetricInfo(Mean, "nats per token", "KL of the policy to the teacher, by the k1 estimate"),
        "train/nll": MetricInfo(Mean, "nats per token", "negative log-prob of given answers, without weights"),
        "train/nonfinite_grads": MetricInfo(Sum, "steps", "gradients that were not finite; they move nothing"),
        "train/nonfinite_advantages": MetricInfo(Mean, "fraction", "tokens whose advantage is not finite"),
        "train/nonfinite_losses": MetricInfo(Mean, "fraction", "tokens whose loss is not finite"),
        "train/skipped": MetricInfo(Sum, "rollouts", "rollouts in which nothing trained"),
        "train/grad_norm": MetricInfo(Mean, "", "norm of the gradient before clipping"),
        "train/lr": MetricInfo(Last, "", "learning rate of the latest optimizer step"),
        "train/value_loss": MetricInfo(Mean, "reward^2", "the critic's squared error to the returns, clipped"),
        "train/value_clipfrac": MetricInfo(Mean, "fraction", "tokens whose value moved further than its clip allows"),
        "train/explained_variance": MetricInfo(
            Last, "fraction", "1 - Var(return - value) / Var(return), with values from before the step"
        ),
        "train/critic_grad_norm": MetricInfo(Mean, "", "norm of the critic's gradient before clipping"),
        "train/critic_nonfinite_grads": MetricInfo(Sum, "steps", "the critic's gradients that were not finite"),
        "train/critic_lr": MetricInfo(Last, "", "learning rate of the critic's latest optimizer step"),
        "perf/rollout_tokens_per_s": MetricInfo(Sum, "tokens/s", "sampled tokens a second"),
        "perf/train_tokens_per_s": MetricInfo(Sum, "tokens/s", "trained tokens a second, prompts included"),
        "perf/rollout_time_s": MetricInfo(Max, "s", "time of the rollout"),
        "perf/train_time_s": MetricInfo(Max, "s", "time of the training"),
        "perf/critic_time_s": MetricInfo(Max, "s", "time of the critic's training, its values included"),
        "perf/step_time_s": MetricInfo(Max, "s", "time of the whole step"),
        "eval/reward_mean": MetricInfo(Mean, "reward", "mean over the scored evaluation samples"),
        "eval/reward_ci95": MetricInfo(Last, "reward", "half width of the 95% interval of the mean evaluation reward"),
        "eval/nll": MetricInfo(Mean, "nats per token", "negative log-prob of held-out answers, without weights"),
        "eval/pass_at_k": MetricInfo(Mean, "fraction", "prompts solved by at least one of k answers, unbiased"),
    }
)


def check_name(key: str) -> str:
    """Return the family of a metric.

    Raises:
        ValueError: the name is not `family/name` with a known family.
    """
    family, _, name = key.partition("/")
    if family not in FAMILIES or not name:
        raise ValueError(f"metric {key!r}: must be named family/name with a family of {', '.join(FAMILIES)}")
    return family


def combine(parts: Iterable[Mapping[str, MetricValue]]) -> dict[str, MetricValue]:
    """Put parts together, in order. A part may lack a metric.

    Raises:
        ValueError: a name is malformed, or a metric comes with another reduction than declared or than in another part.
    """
    whole: dict[str, MetricValue] = {}
    for part in parts:
        for key, value in part.items():
            check_name(key)
            declared = METRICS[key].reduction if key in METRICS else type(whole.get(key, value))
            if type(value) is not declared:
                raise ValueError(f"metric {key!r}: reduced by {declared.__name__}, but got a {type(value).__name__}")
            whole[key] = whole[key] + value if key in whole else value  # type: ignore[operator]
    return whole


def reduce(parts: Iterable[Mapping[str, MetricValue]]) -> dict[str, float]:
    """Put parts together and return plain numbers; a mean of nothing is left out."""
    results = ((key, value.result) for key, value in combine(parts).items())
    return {key: float(result) for key, result in results if result is not None}
