"""Supervised fine-tuning as a rollout manager: its answers come from the data, so a rollout samples nothing."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING

from limes.config import Config
from limes.data import Conversation, DataCursor, EncodedPrompt
from limes.data.conversations import MESSAGE_WEIGHT
from limes.engine.protocol import Engine
from limes.records import Sample, Status, TrainShard
from limes.rewards import Grade
from limes.rollout.build import sampling_params
from limes.rollout.conversations import Conversations
from limes.rollout.deal import deal
from limes.rollout.manager import Report, RolloutManager
from limes.rollout.metrics import Metrics, length_metrics, mean
from limes.rollout.sampling import Sampler
from limes.rollout.shards import shards_of
from limes.run import Console, Last, Max, Mean, Sum, reduce, write_samples

if TYPE_CHECKING:
    from limes.models.policy import TextModel

Score = Callable[[Sequence[Sample]], Awaitable[list[float]]]
"""Log-probs of the samples' answer tokens under the current weights, samples end to end."""


class NoGrader:
    """Nothing is rewarded."""

    async def grade(self, samples: list[Sample]) -> list[Grade]:
        """No reward, and no error."""
        return [Grade(None) for _ in samples]

    async def close(self) -> None:
        """Nothing to close."""


class SftManager(RolloutManager):
    """Draws conversations and gives one sample for each of their answers, with its prompt as generation renders it.

    A group is a conversation. `Sample.index` is that of the group times the answers of the longest conversation, plus
    the place of the answer, so it follows from the place in the data. Samples have neither reward nor engine log-probs.

    Args:
        conversations: what there is to learn.
        score: log-probs of given answers, for the loss on held-out conversations.
    """

    def __init__(
        self,
        config: Config,
        *,
        engine: Engine,
        sampler: Sampler,
        conversations: Conversations,
        score: Score,
        samples_folder: Path,
        console: Console,
    ) -> None:
        training, seed, shuffle = conversations.training, config.run.seed, config.data.shuffle
        cursor = None if training is None else DataCursor(training, seed=seed, shuffle=shuffle, n_samples_per_prompt=1)
        super().__init__(
            config,
            engine=engine,
            grader=sampler.grader,
            sampler=sampler,
            eval_sampler=sampler,
            cursor=cursor,
            keep=None,
            questions=conversations.questions,
            samples_folder=samples_folder,
            console=console,
        )
        self._held_out = conversations.held_out.conversations
        self._most_turns = max(
            len(c.turns) for part in (training, conversations.held_out) if part for c in part.conversations
        )
        self._score = score

    async def generate(self, rollout_id: int, num_ranks: int = 1) -> list[TrainShard]:
        """The answers of the next `rollout.batch_size` conversations; one shard for each rank of the actor."""
        assert self._cursor is not None, "a manager without training conversations cannot generate"
        started = time.perf_counter()
        epoch = self._cursor.epoch
        samples: list[Sample] = []
        for group in self._cursor.next_groups(self.config.rollout.batch_size):
            place = group[0].group_index
            samples += self._samples(self._cursor.prompt_of(place), place)
        write_samples(self._samples_folder, rollout_id, samples)
        metrics = conversation_metrics(samples, "rollout")
        metrics |= {"rollout/epoch": Last(epoch), "perf/rollout_time_s": Max(time.perf_counter() - started)}
        self._report = Report(reduce([metrics]))
        return supervised_shards(rollout_id, samples, num_ranks, self.config.trainer.num_steps_per_rollout)

    async def eval(self, rollout_id: int) -> Report:
        """The loss on held-out conversations, a mean over the tokens of all their answers, whatever their weights."""
        started = time.perf_counter()
        samples = [s for place, c in enumerate(self._held_out) for s in self._samples(c, place)]
        detail = "" if self._cursor is None else f"before rollout {rollout_id}"
        with self._one_of_the_running(), self._console.phase("evaluate", detail=detail):
            log_probs = iter(await self._score(samples))
        for sample in samples:
            sample.metadata["nll"] = -sum(next(log_probs) for _ in range(sample.response_length))
        write_samples(self._samples_folder, rollout_id, samples, "eval")
        metrics = conversation_metrics(samples, "eval")
        num_tokens = sum(sample.response_length for sample in samples)
        metrics |= {
            "eval/prompts": Sum(len(self._held_out)),
            "eval/nll": Mean(sum(sample.metadata["nll"] for sample in samples), num_tokens),
            "perf/eval_time_s": Max(time.perf_counter() - started),
        }
        return Report(reduce([metrics]))

    def _samples(self, conversation: EncodedPrompt, place: int) -> Iterator[Sample]:
        assert isinstance(conversation, Conversation)
        for number, turn in enumerate(conversation.turns):
            length = len(turn.answer_ids)
            yield Sample(
                index=place * self._most_turns + number,
                group_index=place,
                rollout_id=place,
                prompt=turn.prompt,
                tokens=[*turn.prompt_ids, *turn.answer_ids],
                response=turn.answer,
                response_length=length,
                loss_mask=[1] * length,
                rollout_log_probs=[nan] * length,
                weight_versions=[0] * length,
                status=Status.COMPLETED,
                metadata=conversation.metadata | {MESSAGE_WEIGHT: turn.weight},
            )


def conversation_metrics(samples: Sequence[Sample], family: str) -> Metrics:
    """How many answers there are and how long they are; names start with `family`."""
    metrics: Metrics = {
        "conversations": Sum(len({sample.group_index for sample in samples})),
        "samples": Sum(len(samples)),
        "tokens": Sum(sum(sample.response_length for sample in samples)),
        "prompt_len_mean": mean([sample.prompt_length for sample in samples]),
        **length_metrics(samples),
    }
    return {f"{family}/{name}": value for name, value in metrics.items()}


def supervised_shards(
    rollout_id: int, samples: Sequence[Sample], num_ranks: int = 1, num_steps: int = 1
) -> list[TrainShard]:
    """Deal samples out, one shard a rank; all train, none has a reward."""
    partitions = deal(samples, range(len(samples)), num_ranks, num_steps=num_steps)
    num_trained = [sample.response_length for sample in samples]
    return shards_of(rollout_id, samples, partitions, [None] * len(samples), num_trained)


def build_sft_manager(
    config: Config,
    policy: TextModel,
    engine: Engine,
    conversations: Conversations,
    *,
    score: Score,
    samples_folder: Path,
    console: Console,
) -> SftManager:
    """Put the manager together."""
    sampler = Sampler(
        engine,
        NoGrader(),
        decode=lambda token_ids: policy.tokenizer.decode(token_ids, skip_special_tokens=True),
        sampling=sampling_params(config.eval_sampling(), policy.end_token_ids),
        timeout_s=config.rollout.sample_timeout_s,
        purpose="eval",
    )
    return SftManager(
        config,
        engine=engine,
        sampler=sampler,
        conversations=conversations,
        score=score,
        samples_folder=samples_folder,
        console=console,
    )
