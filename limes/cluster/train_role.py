"""Train workers as roles: with their memory, and, in a process of their own, with the way to the engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from limes.cluster.memory import DeviceMemory, memory_plan
from limes.cluster.remote_engine import RayPeer
from limes.config import Config
from limes.records import TrainShard
from limes.weights import UpdateReport, WeightSource, build_sender, drain

if TYPE_CHECKING:
    from limes.cluster.ray_actor import RayActor
    from limes.models.policy import Policy


class EngineFeed:
    """Hands weights to engines; a worker tells it of new ones as it tells an engine that shares its tensors.

    Args:
        engines: roles of engines; empty on ranks that hand nothing over.
        folder: for files.

    Attributes:
        source: gives the weights as they are.
        report: of the latest hand-over.
    """

    def __init__(self, config: Config, policy: Policy, engines: Sequence[RayActor], folder: Path) -> None:
        settings = config.weights.model_copy(update={"transport": config.weight_transport()})
        self._sender = build_sender(settings, device=policy.device, folder=folder)
        self._peers = [RayPeer(engine) for engine in engines]
        # memory that engines let go of is not where it was, and must not be held here either
        self._anew = "weights" in memory_plan(config).rollout_tags
        self._is_connected = False
        self.source: Callable[[], WeightSource] | None = None
        self.report: UpdateReport | None = None

    async def set_weight_version(self, version: int) -> None:
        """Hand the weights over as `version`."""
        assert self.source is not None
        source = self.source()
        if not self._peers:
            return drain(source)
        if not self._is_connected:
            self._sender.connect(source, self._peers)
            self._is_connected = True
        self.report = self._sender.update(source, version)
        if self._anew:
            self.close()

    def close(self) -> None:
        """Leave nothing behind; engines keep their weights."""
        if self._is_connected:
            self._sender.close()
        self._is_connected = False


class TrainRole:
    """A train worker or a critic's, which comes back to its device for what needs it.

    Args:
        worker: see `limes.training.worker.TrainWorker` and `limes.training.critic.CriticWorker`.
        memory: of the worker.
        config: a critic and an actor that share devices leave after their own turn.
        feed: the way to engines in other processes.
    """

    def __init__(self, worker: Any, memory: DeviceMemory, config: Config, feed: EngineFeed | None = None) -> None:
        self._worker, self.memory, self._feed = worker, memory, feed
        has_critic = config.algorithm.advantage_estimator == "ppo"
        self._takes_turns = has_critic and config.cluster.colocate_critic
        self._leaves = memory_plan(config).offload_train
        if feed is not None:
            feed.source = worker.weight_source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def train(self, rollout_id: int, shard: TrainShard, *external_data: Any) -> Any:
        """See the worker's `train`."""
        return self._in_turn("train", rollout_id, shard, *external_data)

    def compute_kl(self, rollout_id: int, shard: TrainShard) -> Any:
        """See the worker's `compute_kl`."""
        return self._in_turn("compute_kl", rollout_id, shard)

    def compute_values(self, rollout_id: int, shard: TrainShard, *external_data: Any) -> Any:
        """See the critic's `compute_values`."""
        return self._in_turn("compute_values", rollout_id, shard, *external_data)

    async def update_weights(self) -> int:
        """See the worker's `update_weights`. Weights that are not on the device come back for as long as it takes."""
        self.memory.lend_weights()
        try:
            return await self._worker.update_weights()
        finally:
            self.memory.take_weights()

    def update_report(self) -> dict[str, float]:
        """Metrics of the latest hand-over."""
        report = None if self._feed is None else self._feed.report
        return {} if report is None else report.metrics()

    def save_model(self, rollout_id: int, folder: Path, force_sync: bool = False) -> None:
        """See the worker's `save_model`."""
        self._awake(lambda: self._worker.save_model(rollout_id, folder, force_sync))

    def load(self, folder: Path) -> None:
        """See the worker's `load`."""
        self._awake(lambda: self._worker.load(folder))

    def skip_versions(self, num: int) -> None:
        """Count versions that an earlier run has given out."""
        self._worker.weight_version += num

    def offload(self) -> int:
        """Leave the device; the bytes that were freed."""
        freed = self.memory.offload()
        self._worker.clear_memory()
        return freed

    def onload(self) -> None:
        """Come back to the device."""
        self.memory.onload()

    def close(self) -> None:
        """Leave nothing behind."""
        if self._feed is not None:
            self._feed.close()
        self.memory.close()

    def _in_turn(self, method: str, *args: Any) -> Any:
        self.memory.onload()
        outcome = getattr(self._worker, method)(*args)
        if self._takes_turns:
            if self._leaves:
                self.offload()
            else:
                self._worker.clear_memory()
        return outcome

    def _awake(self, work: Callable[[], None]) -> None:
        was_asleep = self.memory.is_asleep
        self.memory.onload()
        work()
        if was_asleep:
            self.offload()
