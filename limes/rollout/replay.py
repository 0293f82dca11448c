"""Saved rollouts instead of sampled ones: training alone, as often as one likes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from limes.config import Config
from limes.config.counting import num_of
from limes.engine.protocol import (
    Engine,
    EngineHealth,
    GenerateRequest,
    GenerateResult,
    OnToken,
    PauseMode,
    SamplingParams,
)
from limes.records import Sample, TrainShard
from limes.rollout.evaluation import EvalSet
from limes.rollout.groups import CollectedGroups
from limes.rollout.manager import Report, RolloutManager
from limes.rollout.sampling import Sampler
from limes.rollout.sft import NoGrader
from limes.run import Console, read_samples
from limes.run.samples import samples_path


class NoEngine:
    """See `Engine`; there is none, and nothing to let go of."""

    async def generate(self, request: GenerateRequest, on_token: OnToken | None = None) -> GenerateResult:
        """Never called."""
        raise AssertionError("nothing is sampled with cluster.debug_train_only")

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """See `Engine.abort`."""

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`."""

    async def resume(self) -> None:
        """See `Engine.resume`."""

    async def flush_cache(self) -> None:
        """See `Engine.flush_cache`."""

    async def offload(self, tags: Iterable[str]) -> None:
        """See `Engine.offload`."""

    async def onload(self, tags: Iterable[str]) -> None:
        """See `Engine.onload`."""

    async def weight_version(self) -> int:
        """See `Engine.weight_version`."""
        return 0

    async def health(self) -> EngineHealth:
        """See `Engine.health`."""
        return EngineHealth(True, False, 0, 0, 0, 0, frozenset(), 0)

    async def close(self) -> None:
        """See `Engine.close`."""


class ReplayManager(RolloutManager):
    """Gives the rollouts that an earlier run has saved, and neither samples nor evaluates.

    Args:
        engine: that of a process in which it also computes for the trainer; its caches stay offloaded.
        saved: the run's folder of rollouts.

    Raises:
        ValueError: a rollout of this run is not among them.
    """

    def __init__(self, config: Config, *, engine: Engine, saved: Path, samples_folder: Path, console: Console) -> None:
        sampler = Sampler(engine, NoGrader(), lambda ids: "", SamplingParams(1), config.rollout.sample_timeout_s)
        super().__init__(
            config,
            engine=engine,
            grader=sampler.grader,
            sampler=sampler,
            eval_sampler=sampler,
            cursor=None,
            keep=None,
            questions=EvalSet((), 1, (), 0),
            samples_folder=samples_folder,
            console=console,
        )
        self._saved = saved
        wanted = config.rollout.num_rollout or 0
        there = [number for number in range(wanted) if samples_path(saved, number).is_file()]
        if len(there) < wanted:
            raise ValueError(
                f"cluster.load_debug_rollout_data = {config.cluster.load_debug_rollout_data}: {saved} holds "
                f"{num_of(len(there), 'rollout')} of the {wanted} that rollout.num_rollout asks for; name another run "
                "folder, or ask for fewer"
            )

    async def generate(self, rollout_id: int, num_ranks: int = 1) -> list[TrainShard]:
        """Read one rollout; one shard for each data-parallel rank of the actor."""
        started = time.perf_counter()
        samples = [s for s in read_samples(self._saved, rollout_id) if not s.metadata.get("dropped")]
        found = CollectedGroups([list(group) for _, group in groupby(samples, key=lambda sample: sample.group_index)])
        shards = self._cut(rollout_id, found, num_ranks)
        self._report = self._describe(found, shards[0], time.perf_counter() - started)
        return shards

    async def eval(self, rollout_id: int) -> Report:
        """Nothing is evaluated."""
        return Report({})

    async def show_samples(self, num: int) -> list[Sample]:
        """Nothing is sampled."""
        return []

    async def onload_weights(self) -> None:
        """What is offloaded stays so."""

    async def onload_kv(self) -> None:
        """What is offloaded stays so."""

    async def offload(self, tags: Iterable[str]) -> None:
        """Let go of everything, once."""
        if not self._offloaded:
            await super().offload(tags)


def saved_rollouts(path: str) -> Path:
    """The folder of rollouts in a run folder.

    Raises:
        ValueError: there is none.
    """
    found = Path(path) / "rollouts"
    if not found.is_dir():
        raise ValueError(
            f"cluster.load_debug_rollout_data = {path}: no run folder, it lacks rollouts/; name one such as runs/<name>"
        )
    return found


def build_replay_manager(config: Config, engine: Engine, *, samples_folder: Path, console: Console) -> ReplayManager:
    """Put the manager together.

    Raises:
        ValueError: the saved rollouts are not there.
    """
    assert config.cluster.load_debug_rollout_data is not None, "checked with the settings"
    saved = saved_rollouts(config.cluster.load_debug_rollout_data)
    return ReplayManager(config, engine=engine, saved=saved, samples_folder=samples_folder, console=console)
