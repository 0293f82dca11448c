"""What the loop holds of a role: thin, awaitable stand-ins that also hand on what there is to report."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from limes.cluster.local import LocalActor
from limes.cluster.ref import Ref
from limes.records import Sample
from limes.rollout import Report
from limes.run.tracking import Tracking


class RolloutManagerHandle:
    """The rollout manager, see `limes.rollout.RolloutManager`."""

    def __init__(self, actor: LocalActor, tracking: Tracking) -> None:
        self._actor = actor
        self._tracking = tracking

    async def generate(self, rollout_id: int) -> Sequence[Any]:
        """Sample one rollout; the shard, or a ref to it, of each data-parallel rank of the actor."""
        shards = await self._call("generate", rollout_id=rollout_id)
        report: Report = await self._actor.call("report")
        self._tracking.record(rollout_id, report.metrics, report.remarks)
        return shards

    async def eval(self, rollout_id: int) -> dict[str, float]:
        """Evaluate the weights that rollout `rollout_id` is sampled with, or would be."""
        report: Report = await self._call("eval", rollout_id=rollout_id)
        self._tracking.evaluated(rollout_id, report.metrics, report.remarks)
        return report.metrics

    async def show_samples(self, num: int) -> list[Sample]:
        """One answer to each of the first evaluation prompts."""
        return await self._call("show_samples", num)

    async def num_prompts(self) -> int | None:
        """Prompts of one epoch; None where nothing is trained."""
        return await self._actor.call("num_prompts")

    async def offload(self, tags: Iterable[str]) -> None:
        """Let go of engine memory."""
        await self._call("offload", list(tags))

    async def onload_weights(self) -> None:
        """Take back the memory of the weights."""
        await self._call("onload_weights")

    async def onload_kv(self) -> None:
        """Take back the KV cache, then the graphs."""
        await self._call("onload_kv")

    async def save(self, rollout_id: int, folder: Path) -> None:
        """Write the place in the data into a checkpoint folder."""
        await self._call("save", rollout_id=rollout_id, folder=folder)

    async def load(self, folder: Path) -> int:
        """Go on where a checkpoint was saved; returns the id of its rollout."""
        return await self._call("load", folder)

    async def dispose(self) -> None:
        """End what runs, the engine, the grader, and the role's thread, however far the role has come."""
        try:
            if self._actor.alive:
                await self._call("dispose")
        finally:
            await asyncio.to_thread(self._actor.close)

    async def _call(self, method: str, *args: Any, **named: Any) -> Any:
        with self._tracking.span(f"rollout.{method}", **about(named)):
            return await self._actor.call(method, *args, **named)


class TrainGroup:
    """The train workers of one model, see `limes.training.worker.TrainWorker`.

    Attributes:
        role: `actor` or `critic`; the first word of its spans.
        start_rollout_id: the first rollout to do; above 0 when a checkpoint was loaded.
    """

    role = "actor"

    def __init__(self, actors: Sequence[LocalActor], tracking: Tracking, start_rollout_id: int = 0) -> None:
        self._actors = actors
        self._tracking = tracking
        self.start_rollout_id = start_rollout_id

    async def train(
        self, rollout_id: int, shards: Sequence[Any], external_data: Sequence[Ref] | None = None
    ) -> dict[str, float]:
        """Train on a rollout, each worker on its own shard; `external_data` as in `submit_train`."""
        with self._tracking.span(f"{self.role}.train", rollout_id=rollout_id):
            metrics, *_ = await asyncio.gather(*self.submit_train(rollout_id, shards, external_data))
        self._tracking.record(rollout_id, metrics)
        return metrics

    def submit_train(
        self, rollout_id: int, shards: Sequence[Any], external_data: Sequence[Ref] | None = None
    ) -> list[Ref]:
        """Start training and do not wait: one ref a worker.

        Args:
            external_data: one ref a worker: the critic's values for the actor, the actor's KL for the critic. A worker
                starts when its own is there.
        """
        assert len(shards) == len(self._actors), f"{len(shards)} shards for {len(self._actors)} workers"
        extras: Sequence[tuple[Ref, ...]] = [(ref,) for ref in external_data or ()] or [()] * len(shards)
        return [
            actor.call("train", rollout_id, shard, *extra)
            for actor, shard, extra in zip(self._actors, shards, extras, strict=True)
        ]

    def submit_kl(self, rollout_id: int, shards: Sequence[Any]) -> list[Ref]:
        """Start computing the KL to the reference that is in the reward, for the critic: one ref a worker."""
        return [actor.call("compute_kl", rollout_id, shard) for actor, shard in zip(self._actors, shards, strict=True)]

    async def update_weights(self) -> int:
        """Give the engines the weights as they are now; returns their version."""
        version, *_ = await self._all("update_weights")
        return version

    async def clear_memory(self) -> None:
        """Let go of what training leaves behind on the device."""
        await self._all("clear_memory")

    async def save_model(self, rollout_id: int, folder: Path, force_sync: bool = False) -> None:
        """Write weights and optimizer into a checkpoint folder; `force_sync` returns only when it is on the disk."""
        await self._all("save_model", rollout_id=rollout_id, folder=folder, force_sync=force_sync)

    async def load(self, folder: Path) -> None:
        """Take weights, optimizer and schedule from a checkpoint folder."""
        await self._all("load", folder)

    async def dispose(self) -> None:
        """End the workers' threads."""
        gc.unfreeze()
        await asyncio.gather(*(asyncio.to_thread(actor.close) for actor in self._actors))

    async def _all(self, method: str, *args: Any, **named: Any) -> list[Any]:
        with self._tracking.span(f"{self.role}.{method}", **about(named)):
            return await asyncio.gather(*(actor.call(method, *args, **named) for actor in self._actors))


class CriticGroup(TrainGroup):
    """The critic's workers, see `limes.training.critic.CriticWorker`.

    Their `train` gives values, as `submit_train`'s refs, and tells its metrics afterwards.
    """

    role = "critic"

    async def finish_train(self, rollout_id: int, values: Sequence[Ref]) -> dict[str, float]:
        """Wait for training that was submitted, and report it."""
        await asyncio.gather(*values)
        metrics, *_ = await self._all("report")
        self._tracking.record(rollout_id, metrics)
        return metrics


def about(named: Mapping[str, Any]) -> dict[str, Any]:
    """What a span says of its call: the rollout, where the call names one."""
    return {name: named[name] for name in ("rollout_id",) if name in named}
