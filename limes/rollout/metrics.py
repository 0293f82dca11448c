"""What a set of samples says in numbers: rewards, lengths, failures by cause.

Rewards are what graders gave, before `algorithm.truncated` shapes them. Unscored samples are outside every reward
statistic and counted apart; lengths are of real tokens, whether they train or not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from limes.algorithms.metrics import zero_variance_groups
from limes.records import Reward, Sample, Status, TrainShard
from limes.rewards import scalar_reward
from limes.rollout.groups import CollectedGroups
from limes.rollout.sampling import cause_of, has_answer
from limes.rollout.statistics import clustered_half_width
from limes.run.metrics import Last, Max, Mean, MetricValue, Min, Sum

Metrics = dict[str, MetricValue]

SOURCE = "source"
"""Entry of `Sample.metadata`: where the prompt is from, for data that mix several sets."""


def sample_metrics(samples: Sequence[Sample], reward_key: str | None, family: str) -> Metrics:
    """Rewards with their 95% interval, lengths, ends and failures of samples; names start with `family`."""
    answered = [sample for sample in samples if has_answer(sample)]
    metrics: Metrics = {
        "samples": Sum(len(samples)),
        "truncated_frac": mean([sample.status is Status.TRUNCATED for sample in answered]),
        "failed": Sum(sum(sample.status is Status.FAILED for sample in samples)),
        "aborted": Sum(sum(sample.status is Status.ABORTED for sample in samples)),
        "tokens": Sum(sum(sample.response_length for sample in samples)),
        "prompt_len_mean": mean([sample.prompt_length for sample in samples]),
        **reward_metrics(answered, reward_key),
        **length_metrics(answered),
        **counted("stop", Counter(sample.status.value for sample in samples)),
        **counted("failed", causes(sample for sample in samples if sample.status is Status.FAILED)),
    }
    return {f"{family}/{name}": value for name, value in metrics.items()}


def reward_metrics(answered: Sequence[Sample], reward_key: str | None) -> Metrics:
    """Mean reward of the scored answers, its interval clustered by group, and the answers without a reward."""
    rewards = [(sample, scalar_reward(sample.reward, reward_key)) for sample in answered]
    scored = [(sample.group_index, reward) for sample, reward in rewards if reward is not None]
    unscored = [sample for sample, reward in rewards if reward is None]
    errors = causes(sample for sample in unscored if sample.error is not None)
    metrics: Metrics = {
        "reward_mean": mean([reward for _, reward in scored]),
        "unscored": Sum(len(unscored)),
        "grader_errors": Sum(errors.total()),
        **counted("grader_errors", errors),
        **part_metrics([sample.reward for sample, reward in rewards if reward is not None]),
        **source_metrics([(sample, reward) for sample, reward in rewards if reward is not None]),
    }
    half_width = clustered_half_width([reward for _, reward in scored], [group for group, _ in scored])
    if half_width is not None:
        metrics["reward_ci95"] = Last(half_width)
    return metrics


def part_metrics(rewards: Sequence[Reward]) -> Metrics:
    """Mean of each numeric entry of dict rewards, over the answers that have it."""
    parts: dict[str, list[float]] = {}
    for reward in rewards:
        for name, part in reward.items() if isinstance(reward, Mapping) else ():
            if isinstance(part, int | float) and math.isfinite(part):
                parts.setdefault(name, []).append(float(part))
    return {f"reward/{as_name(name)}": mean(values) for name, values in parts.items()}


def source_metrics(scored: Sequence[tuple[Sample, float]]) -> Metrics:
    """Mean reward of each source of prompts, as the `source` of their metadata names it."""
    found: dict[str, list[float]] = {}
    for sample, reward in scored:
        source = sample.metadata.get(SOURCE)
        if source is not None:
            found.setdefault(str(source), []).append(reward)
    return {f"reward_of/{as_name(source)}": mean(rewards) for source, rewards in found.items()}


def length_metrics(answered: Sequence[Sample]) -> Metrics:
    """Lengths of the answers in tokens."""
    lengths = [sample.response_length for sample in answered]
    if not lengths:
        return {}
    return {
        "response_len_mean": mean(lengths),
        "response_len_min": Min(min(lengths)),
        "response_len_max": Max(max(lengths)),
    }


def rollout_metrics(found: CollectedGroups, reward_key: str | None, shard: TrainShard) -> Metrics:
    """Metrics of a rollout: its kept samples, groups without a signal, groups that were dropped and why.

    Args:
        shard: any one, for its global lists.
    """
    samples = [sample for group in found.kept for sample in group]
    num_equal, num_scored = equal_groups(shard)
    return {
        **sample_metrics(samples, reward_key, "rollout"),
        "rollout/zero_std_frac": Mean(num_equal, num_scored),
        "rollout/trained_samples": Sum(sum(reward is not None for reward in shard.rewards)),
        "rollout/dropped_groups": Sum(len(found.dropped)),
        "rollout/surplus_groups": Sum(found.num_surplus),
        **counted("rollout/dropped", found.drop_reasons),
    }


def equal_groups(shard: TrainShard) -> tuple[int, int]:
    """How many groups train on rewards that are all equal, which moves nothing, and how many train at all."""
    rewards = [0.0 if reward is None else reward for reward in shard.rewards]
    return zero_variance_groups(rewards, shard.group_ids, valid=[reward is not None for reward in shard.rewards])


def causes(samples: Iterable[Sample]) -> Counter[str]:
    """How many samples each cause of an error cost."""
    return Counter(cause_of(sample.error or "unknown") for sample in samples)


def counted(prefix: str, counts: Counter[str]) -> Metrics:
    """One sum for each word that was counted, named `prefix/word`."""
    return {f"{prefix}/{as_name(word)}": Sum(count) for word, count in counts.items()}


def as_name(word: str) -> str:
    """A word as part of a metric name."""
    return "_".join(word.split())[:60].replace("/", "_") or "unknown"


def mean(values: Sequence[float]) -> Mean:
    """The mean of values, which knows how many they are."""
    return Mean(float(sum(values)), len(values))
