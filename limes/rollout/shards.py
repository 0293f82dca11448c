"""From the samples of a rollout to what each data-parallel rank trains on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from limes.config import Config
from limes.records import Sample, Status, TrainShard
from limes.rewards import overlong_penalty, scalar_reward
from limes.rollout.deal import deal
from limes.rollout.sampling import has_answer

Truncated = Literal["keep", "zero", "mask"]
LengthTerm = Callable[[int], float]
"""What the number of an answer's tokens adds to its reward."""


def make_shards(
    rollout_id: int,
    samples: Sequence[Sample],
    *,
    num_ranks: int = 1,
    reward_key: str | None = None,
    truncated: Truncated = "keep",
    length_term: LengthTerm | None = None,
    num_steps: int = 1,
    keep_groups: bool = False,
) -> list[TrainShard]:
    """Cut a rollout into one shard a rank; see `deal.deal` for who gets what.

    The position of a sample in `samples` is its global position. Samples that do not train are in no shard, but every
    shard's global lists have their positions: no reward, no trained token.
    """
    rewards = [training_reward(sample, reward_key, truncated, length_term) for sample in samples]
    num_trained = [0 if reward is None else sum(s.loss_mask) for s, reward in zip(samples, rewards, strict=True)]
    trained = [position for position, reward in enumerate(rewards) if reward is not None]
    partitions = deal(samples, trained, num_ranks, num_steps=num_steps, keep_groups=keep_groups)
    return shards_of(rollout_id, samples, partitions, rewards, num_trained)


def shards_of(
    rollout_id: int,
    samples: Sequence[Sample],
    partitions: Sequence[list[int]],
    rewards: Sequence[float | None],
    num_trained: Sequence[int],
) -> list[TrainShard]:
    """The shards of the ranks that have `partitions`; the other lists are of all samples and in their order."""
    return [
        TrainShard(
            rollout_id=rollout_id,
            samples=[samples[position] for position in partition],
            partition=partition,
            rewards=list(rewards),
            group_ids=[sample.group_index for sample in samples],
            num_trained_tokens=list(num_trained),
        )
        for partition in partitions
    ]


def length_term_of(config: Config) -> LengthTerm | None:
    """The soft over-long penalty, where `algorithm.overlong_buffer` asks for one."""
    buffer, longest = config.algorithm.overlong_buffer, config.rollout.max_response_len
    if buffer is None:
        return None
    return lambda length: config.algorithm.overlong_penalty * overlong_penalty(length, longest, buffer)


def training_reward(
    sample: Sample, reward_key: str | None, truncated: Truncated, length_term: LengthTerm | None = None
) -> float | None:
    """The reward that training sees; None leaves the sample out of training and of its group's statistics.

    `Sample.reward` stays what the grader gave. An answer cut at the length limit keeps it, counts as 0, or is left out,
    as `algorithm.truncated` says; one that failed, was aborted, is unscored or has no token to train on is always out.
    The length term comes on top.
    """
    reward = scalar_reward(sample.reward, reward_key)
    if reward is None or not has_answer(sample) or not any(sample.loss_mask):
        return None
    if sample.status is Status.TRUNCATED and truncated == "mask":
        return None
    if sample.status is Status.TRUNCATED and truncated == "zero":
        reward = 0.0
    return reward if length_term is None else reward + length_term(sample.response_length)
