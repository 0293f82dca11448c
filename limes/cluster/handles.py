"""What the loop holds of a role: thin, awaitable stand-ins that also hand on what there is to report."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from limes.cluster.ref import Actor, Ref
from limes.records import Sample
from limes.rollout import Report
from limes.run.tracking import Tracking
from limes.weights.messages import CheckWeights
from limes.weights.names import WeightError
from limes.weights.receiver import CheckAction


class RolloutManagerHandle:
    """The rollout manager, see `limes.rollout.RolloutManager`.

    Attributes:
        num_ranks: data-parallel ranks of the actor.
        engines: roles of engines in processes of their own; they end with the manager.
    """

    def __init__(self, actor: Actor, tracking: Tracking, engines: Sequence[Actor] = ()) -> None:
        self._actor, self.engines = actor, engines
        self._tracking = tracking
        self.num_ranks = 1

    async def ready(self) -> None:
        """Wait until it is built; raises what its construction raised."""
        await self._actor.ready()

    async def generate(self, rollout_id: int) -> Sequence[Any]:
        """Sample one rollout; the shard, or a ref to it, of each data-parallel rank of the actor."""
        ranks = {} if self.num_ranks == 1 else {"num_ranks": self.num_ranks}
        shards = await self._call("generate", rollout_id=rollout_id, **ranks)
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

    async def check_weights(self, action: CheckAction) -> None:
        """Whether updates reach every weight: `snapshot`, `scramble`, then an update of the same weights, `compare`.

        Raises:
            WeightError: `compare` finds weights that differ; names them.
        """
        with self._tracking.span("rollout.check_weights"):
            found = await asyncio.gather(*(engine.call("weights", CheckWeights(action)) for engine in self.engines))
        differing = [
            f"{engine.name}: {', '.join(names)}" for engine, names in zip(self.engines, found, strict=True) if names
        ]
        if differing:
            raise WeightError(f"an update did not reach all weights of {'; '.join(differing)}")

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
            actors = [self._actor, *self.engines]
            await asyncio.gather(*(asyncio.to_thread(actor.close) for actor in actors))

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

    def __init__(
        self,
        actors: Sequence[Actor],
        tracking: Tracking,
        start_rollout_id: int = 0,
        *,
        tells_updates: bool = False,
    ) -> None:
        self._actors = actors
        self._tracking = tracking
        self._tells_updates = tells_updates
        self._latest: int | None = None
        self.start_rollout_id = start_rollout_id

    @property
    def has_workers(self) -> bool:
        """There is somebody to train."""
        return bool(self._actors)

    async def ready(self) -> None:
        """Wait until all workers are built; raises what their construction raised."""
        await asyncio.gather(*(actor.ready() for actor in self._actors))

    async def train(
        self, rollout_id: int, shards: Sequence[Any], external_data: Sequence[Ref] | None = None
    ) -> dict[str, float]:
        """Train on a rollout, each worker on its own shard; `external_data` as in `submit_train`."""
        if not self._actors:
            return {}
        with self._tracking.span(f"{self.role}.train", rollout_id=rollout_id):
            metrics, *_ = await asyncio.gather(*self.submit_train(rollout_id, shards, external_data))
        self._tracking.record(rollout_id, metrics)
        self._latest = rollout_id
        return metrics

    def submit_train(
        self, rollout_id: int, shards: Sequence[Any], external_data: Sequence[Ref] | None = None
    ) -> list[Ref]:
        """Start training and do not wait: one ref a worker.

        Args:
            external_data: one ref a worker: the critic's values for the actor, the actor's KL for the critic. A worker
                starts when its own is there.
        """
        return self._submit("train", rollout_id, shards, external_data)

    def _submit(
        self, method: str, rollout_id: int, shards: Sequence[Any], external_data: Sequence[Ref] | None
    ) -> list[Ref]:
        extras: Sequence[tuple[Ref, ...]] = [(ref,) for ref in external_data or ()] or [()] * len(self._actors)
        return [
            actor.call(method, rollout_id, shard, *extra)
            for actor, shard, extra in zip(self._actors, self._own(shards), extras, strict=True)
        ]

    def submit_kl(self, rollout_id: int, shards: Sequence[Any]) -> list[Ref]:
        """Start computing the KL to the reference that is in the reward, for the critic: one ref a worker."""
        own = zip(self._actors, self._own(shards), strict=True)
        return [actor.call("compute_kl", rollout_id, shard) for actor, shard in own]

    async def update_weights(self) -> int:
        """Give the engines the weights as they are now; returns their version."""
        if not self._actors:
            return 0
        version, *_ = await self._all("update_weights")
        if self._tells_updates:
            metrics = await self._actors[0].call("update_report")
            self._tracking.record(self.start_rollout_id if self._latest is None else self._latest, metrics)
        return version

    async def offload(self) -> None:
        """Leave the device."""
        await self._all("offload")

    async def onload(self) -> None:
        """Come back to it."""
        await self._all("onload")

    async def clear_memory(self) -> None:
        """Let go of what training leaves behind on the device."""
        await self._all("clear_memory")

    async def save_model(self, rollout_id: int, folder: Path, force_sync: bool = False) -> None:
        """Write weights and optimizer into a checkpoint folder; `force_sync` returns only when it is on the disk."""
        await self._all("save_model", rollout_id=rollout_id, folder=folder, force_sync=force_sync)

    async def load(self, folder: Path) -> None:
        """Take weights, optimizer and schedule from a checkpoint folder."""
        await self._all("load", folder)

    async def skip_versions(self, num: int) -> None:
        """Count versions that an earlier run has given out."""
        await self._all("skip_versions", num)

    async def dispose(self) -> None:
        """End the workers' threads."""
        gc.unfreeze()
        await asyncio.gather(*(asyncio.to_thread(actor.close) for actor in self._actors))

    def _own(self, shards: Sequence[Any]) -> list[Any]:
        """The shard of each worker; neighbours share one where their ranks share samples."""
        assert len(self._actors) % len(shards) == 0, f"{len(shards)} shards for {len(self._actors)} workers"
        each = len(self._actors) // len(shards)
        return [shards[rank // each] for rank in range(len(self._actors))]

    async def _all(self, method: str, *args: Any, **named: Any) -> list[Any]:
        with self._tracking.span(f"{self.role}.{method}", **about(named)):
            return await asyncio.gather(*(actor.call(method, *args, **named) for actor in self._actors))


class CriticGroup(TrainGroup):
    """The critic's workers, see `limes.training.critic.CriticWorker`.

    Their `train` gives values, as `submit_train`'s refs, and tells its metrics afterwards. On devices of its own a
    critic gives them before it trains, so that the actor trains at the same time.
    """

    role = "critic"

    def __init__(self, actors: Sequence[Actor], tracking: Tracking, *, is_apart: bool = False) -> None:
        super().__init__(actors, tracking)
        self._is_apart = is_apart
        self._training: list[Ref] = []

    def submit_train(
        self, rollout_id: int, shards: Sequence[Any], external_data: Sequence[Ref] | None = None
    ) -> list[Ref]:
        """See `TrainGroup.submit_train`; one ref to values a worker."""
        if not self._is_apart:
            return super().submit_train(rollout_id, shards, external_data)
        values = self._submit("compute_values", rollout_id, shards, external_data)
        self._training = super().submit_train(rollout_id, shards, external_data)
        return values

    async def finish_train(self, rollout_id: int, values: Sequence[Ref]) -> dict[str, float]:
        """Wait for training that was submitted, and report it."""
        training, self._training = [*values, *self._training], []
        await asyncio.gather(*(ref.settled() for ref in training))
        metrics, *_ = await self._all("report")
        self._tracking.record(rollout_id, metrics)
        return metrics


def about(named: Mapping[str, Any]) -> dict[str, Any]:
    """What a span says of its call: the rollout, where the call names one."""
    return {name: named[name] for name in ("rollout_id",) if name in named}
