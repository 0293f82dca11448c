"""The rollout manager: owner of engine, data cursor and grader."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from limes.config import Config
from limes.data import DataCursor
from limes.engine.protocol import Engine, EngineError, SampleKey
from limes.records import Sample, TrainShard
from limes.rewards import Grader
from limes.rollout.evaluation import EvalSet, eval_metrics, evaluate
from limes.rollout.filters import Filter
from limes.rollout.groups import CollectedGroups, GroupLoop
from limes.rollout.metrics import Metrics, rollout_metrics
from limes.rollout.remarks import failure_remarks, rollout_remarks, singleton_remarks
from limes.rollout.sampling import Sampler
from limes.rollout.shards import length_term_of, make_shards
from limes.rollout.state import read_state, write_state
from limes.run import Console, Max, Sum, reduce, write_samples

CLOSE_DEADLINE_S = 20.0
BUSY_ENGINE_S = 1.0


@dataclass(frozen=True, slots=True)
class Report:
    """What there is to say about a rollout or an evaluation: numbers, and sentences about what went wrong."""

    metrics: dict[str, float]
    remarks: list[str] = field(default_factory=list)


class RolloutManager:
    """Turns prompts into graded samples.

    Args:
        sampler: samples and grades training answers.
        eval_sampler: the same for evaluation answers.
        cursor: the training prompts; None where nothing is trained.
        keep: the dynamic filter.
        questions: the evaluation prompts.
        samples_folder: where every rollout writes its samples.
    """

    def __init__(
        self,
        config: Config,
        *,
        engine: Engine,
        grader: Grader,
        sampler: Sampler,
        eval_sampler: Sampler,
        cursor: DataCursor | None,
        keep: Filter | None,
        questions: EvalSet,
        samples_folder: Path,
        console: Console,
    ) -> None:
        self.config = config
        self.engine = engine
        self.grader = grader
        self._sampler = sampler
        self._eval_sampler = eval_sampler
        self._cursor = cursor
        self._keep = keep
        self._questions = questions
        self._samples_folder = samples_folder
        self._console = console
        self._offloaded: set[str] = set()
        self._running: set[asyncio.Task[Any]] = set()
        self._report = Report({})

    def num_prompts(self) -> int | None:
        """Prompts of one epoch; None where nothing is trained."""
        return None if self._cursor is None else self._cursor.prompts_per_epoch

    async def generate(self, rollout_id: int, num_ranks: int = 1) -> list[TrainShard]:
        """Sample and grade one rollout; one shard for each data-parallel rank of the actor.

        The noise of a sample is keyed by the run's seed, the rollout and its place in it (`GroupLoop`), so answers do
        not depend on what else runs or on which finished first.

        Raises:
            NoGroupsLeft: the dynamic filter left too little.
            EngineError: nothing can be trained on and the engine is dead.
        """
        assert self._cursor is not None, "a manager without training prompts cannot generate"
        settings, seed = self.config.rollout, self.config.run.seed
        num_in_flight = settings.over_sampling_batch_size or settings.batch_size
        started = time.perf_counter()
        with (
            self._one_of_the_running(),
            self._counting(
                self._sampler, "generate", num_in_flight * settings.n_samples_per_prompt, f"rollout {rollout_id}"
            ) as grow,
        ):
            found = await GroupLoop(
                self._cursor,
                self._sampler,
                keep=self._keep,
                key=lambda position: SampleKey(seed, rollout_id, position),
                batch_size=settings.batch_size,
                num_in_flight=num_in_flight,
                max_dropped=settings.max_refill_rounds * settings.batch_size,
                on_dropped=lambda group: grow(len(group)),
            ).run()
        shards = self._cut(rollout_id, found, num_ranks)
        self._report = self._describe(found, shards[0], time.perf_counter() - started)
        if not any(shard.samples for shard in shards):
            await self._raise_if_dead()
        return shards

    def report(self) -> Report:
        """What there is to say about the last rollout."""
        return self._report

    async def eval(self, rollout_id: int) -> Report:
        """Evaluate the weights that rollout `rollout_id` is sampled with, or would be."""
        questions = self._questions
        detail = "" if self._cursor is None else f"before rollout {rollout_id}"
        total = len(questions.prompts) * questions.n_samples_per_prompt
        started = time.perf_counter()
        with (
            self._one_of_the_running(),
            self._counting(self._eval_sampler, "evaluate", total, detail),
        ):
            groups = await evaluate(questions, self._eval_sampler)
        samples = [sample for group in groups for sample in group]
        write_samples(self._samples_folder, rollout_id, samples, "eval")
        metrics = eval_metrics(groups, questions.ks, self.config.reward.key)
        metrics["perf/eval_time_s"] = Max(time.perf_counter() - started)
        if all(sample.error for sample in samples):
            await self._raise_if_dead()
        return Report(reduce([metrics]), failure_remarks(samples))

    async def show_samples(self, num: int) -> list[Sample]:
        """One answer to each of the first evaluation prompts, always with the same noise."""
        first = replace(self._questions, prompts=self._questions.prompts[:num], n_samples_per_prompt=1)
        with self._one_of_the_running():
            return [sample for group in await evaluate(first, self._eval_sampler) for sample in group]

    async def offload(self, tags: Iterable[str]) -> None:
        """Let go of engine memory; nothing may be generated until it is back."""
        new = [tag for tag in tags if tag not in self._offloaded]
        await self.engine.offload(new)
        self._offloaded.update(new)

    async def onload_weights(self) -> None:
        """Take back the memory of the weights, which are stale until the next update."""
        await self._onload("weights")

    async def onload_kv(self) -> None:
        """Take back the KV cache, then the graphs, which need it and the new weights in place."""
        await self._onload("kv_cache")
        await self._onload("cuda_graph")

    def save(self, rollout_id: int, folder: Path) -> None:
        """Write the place in the data into a checkpoint folder."""
        write_state(folder, rollout_id, {} if self._cursor is None else self._cursor.state_dict())

    def load(self, folder: Path) -> int:
        """Go on where a checkpoint was saved; returns the id of its rollout.

        Raises:
            ValueError: the folder holds no state of a rollout manager.
        """
        rollout_id, state = read_state(folder)
        if self._cursor is not None:
            notice = self._cursor.load_state_dict(state)
            if notice:
                self._console.warn(notice)
        return rollout_id

    async def dispose(self) -> None:
        """End what runs, the engine, the grader and its processes. Each gets a deadline; all are tried.

        An engine whose thread is in the middle of something long, such as a training step, ends after it, alone.
        """
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        closings: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "engine": partial(_close_or_leave, self.engine),
            "grader": self.grader.close,
        }
        errors: list[Exception] = []
        for name, close in closings.items():
            try:
                async with asyncio.timeout(CLOSE_DEADLINE_S):
                    await close()
            except Exception as error:  # noqa: BLE001 (the others must be closed too; raised below)
                error.add_note(f"while closing the {name}, which has {CLOSE_DEADLINE_S:g} s")
                errors.append(error)
        if errors:
            raise errors[0]

    def _cut(self, rollout_id: int, found: CollectedGroups, num_ranks: int) -> list[TrainShard]:
        """Write the samples down, dropped groups last, and cut the kept ones into shards."""
        kept = [sample for group in found.kept for sample in group]
        dropped = [sample for group in found.dropped for sample in group]
        for sample in dropped:
            sample.metadata["dropped"] = True
        write_samples(self._samples_folder, rollout_id, [*kept, *dropped])
        return make_shards(
            rollout_id,
            kept,
            num_ranks=num_ranks,
            reward_key=self.config.reward.key,
            truncated=self.config.algorithm.truncated,
            length_term=length_term_of(self.config),
            num_steps=self.config.trainer.num_steps_per_rollout,
            keep_groups=self.config.algorithm.advantage_estimator == "step_wise",
        )

    def _describe(self, found: CollectedGroups, shard: TrainShard, seconds: float) -> Report:
        kept = [sample for group in found.kept for sample in group]
        num_tokens = sum(sample.response_length for group in [*found.kept, *found.dropped] for sample in group)
        metrics: Metrics = rollout_metrics(found, self.config.reward.key, shard)
        metrics["perf/rollout_time_s"] = Max(seconds)
        metrics["perf/rollout_tokens_per_s"] = Sum(num_tokens / seconds)
        remarks = rollout_remarks(kept, shard) + singleton_remarks(shard, self.config.algorithm)
        return Report(reduce([metrics]), remarks)

    async def _onload(self, tag: str) -> None:
        if tag in self._offloaded:
            await self.engine.onload([tag])
            self._offloaded.discard(tag)

    async def _raise_if_dead(self) -> None:
        health = await self.engine.health()
        if not health.alive:
            raise EngineError(f"the engine is dead and no answer can be had: {health.error or 'no cause known'}")

    @contextmanager
    def _one_of_the_running(self) -> Iterator[None]:
        """Let `dispose` end the current task."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            yield
        finally:
            self._running.discard(task)

    @contextmanager
    def _counting(self, sampler: Sampler, name: str, total: int, detail: str) -> Iterator[Callable[[int], None]]:
        """Show how many samples are done; yields a function that raises the total."""
        at_once = min(total, self.config.engine.max_running)
        with self._console.phase(name, total, detail=detail, at_once=at_once) as phase:
            sampler.on_sample = lambda sample: phase.advance()
            yield lambda more: phase.update(phase.done, (phase.total or 0) + more)


async def _close_or_leave(engine: Engine) -> None:
    """Close an engine from a thread that nobody has to wait for."""
    errors: list[BaseException] = []

    def close() -> None:
        try:
            asyncio.run(engine.close())
        except BaseException as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    thread = threading.Thread(target=close, name="limes-closing", daemon=True)
    thread.start()
    deadline = time.monotonic() + BUSY_ENGINE_S
    while thread.is_alive() and time.monotonic() < deadline:
        await asyncio.sleep(0.005)
    if errors:
        raise errors[0]
