"""From the samples of a rollout to what each data-parallel rank trains on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from limes.records import Sample, Status, TrainShard
from limes.rewards import scalar_reward
from limes.rollout.sampling import has_answer

Truncated = Literal["keep", "zero", "mask"]


def make_shards(
    rollout_id: int,
    samples: Sequence[Sample],
    *,
    num_ranks: int = 1,
    reward_key: str | None = None,
    truncated: Truncated = "keep",
) -> list[TrainShard]:
    """Cut a rollout into one shard a rank.

    The position of a sample in `samples` is its global position. Samples that do not train are in no shard, but every
    shard's global lists have their positions: no reward, no trained token. The others are dealt out in turn.
    """
    rewards = [training_reward(sample, reward_key, truncated) for sample in samples]
    num_trained = [0 if reward is None else sum(s.loss_mask) for s, reward in zip(samples, rewards, strict=True)]
    trained = [position for position, reward in enumerate(rewards) if reward is not None]
    return [
        TrainShard(
            rollout_id=rollout_id,
            samples=[samples[position] for position in partition],
            partition=partition,
            rewards=list(rewards),
            group_ids=[sample.group_index for sample in samples],
            num_trained_tokens=list(num_trained),
        )
        for partition in (trained[rank::num_ranks] for rank in range(num_ranks))
    ]


def training_reward(sample: Sample, reward_key: str | None, truncated: Truncated) -> float | None:
    """The reward that training sees; None leaves the sample out of training and of its group's statistics.

    `Sample.reward` stays what the grader gave. An answer cut at the length limit keeps it, counts as 0, or is left out,
    as `algorithm.truncated` says; one that failed, was aborted, is unscored or has no token to train on is always out.
    """
    reward = scalar_reward(sample.reward, reward_key)
    if reward is None or not has_answer(sample) or not any(sample.loss_mask):
        return None
    if sample.status is Status.TRUNCATED and truncated != "keep":
        return 0.0 if truncated == "zero" else None
    return reward
