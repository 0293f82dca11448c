"""What a person should know about a rollout or an evaluation, in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from limes.config.algorithm import AlgorithmConfig
from limes.config.algorithm_checks import GROUP_BASELINES
from limes.config.counting import num_of
from limes.records import Sample, Status, TrainShard
from limes.rollout.sampling import cause_of, has_answer

MAX_CAUSES = 3


def rollout_remarks(samples: Sequence[Sample], shard: TrainShard) -> list[str]:
    """Why a rollout trains nothing, and what failed in it; empty when all is well."""
    remarks = failure_remarks(samples)
    if all(reward is None for reward in shard.rewards):
        remarks.append(f"nothing to train on: none of {num_of(len(samples), 'answer')} has a reward that trains")
    return remarks


def singleton_remarks(shard: TrainShard, algorithm: AlgorithmConfig) -> list[str]:
    """Groups that have one answer to learn from, where an answer is compared with its siblings alone."""
    compares = algorithm.advantage_estimator in (*GROUP_BASELINES, "step_wise")
    if not compares or algorithm.singletons != "zero":
        return []
    columns = zip(shard.group_ids, shard.rewards, shard.num_trained_tokens, strict=True)
    answers = Counter(group for group, reward, num in columns if reward is not None and num)
    alone = sum(count == 1 for count in answers.values())
    if not alone:
        return []
    return [
        f"{alone} of {num_of(len(answers), 'group')} had one answer that trains: it has nothing to be compared with, "
        "so its advantage is 0 (algorithm.singletons)"
    ]


def failure_remarks(samples: Sequence[Sample]) -> list[str]:
    """What failed: answers, and grading apart from them."""
    failed = [sample for sample in samples if sample.status is Status.FAILED]
    ungraded = [sample for sample in samples if has_answer(sample) and sample.reward is None and sample.error]
    remarks = []
    if failed:
        remarks.append(f"{len(failed)} of {num_of(len(samples), 'answer')} failed: {list_causes(failed)}")
    if ungraded:
        remarks.append(
            f"{len(ungraded)} of {num_of(len(samples), 'answer')} could not be graded: {list_causes(ungraded)}"
        )
    return remarks


def list_causes(samples: Iterable[Sample]) -> str:
    """The most frequent causes, each with its count and the first message."""
    firsts: dict[str, str] = {}
    counts: dict[str, int] = {}
    for sample in samples:
        error = sample.error or "unknown"
        cause = cause_of(error)
        firsts.setdefault(cause, error)
        counts[cause] = counts.get(cause, 0) + 1
    ranked = sorted(counts, key=lambda cause: -counts[cause])
    texts = [f"{counts[cause]} x {' '.join(firsts[cause].split())[:200]}" for cause in ranked[:MAX_CAUSES]]
    left = len(ranked) - MAX_CAUSES
    return "; ".join(texts) + (f"; and {num_of(left, 'more kind')}" if left > 0 else "")
