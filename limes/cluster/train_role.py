"""A trainer in a process of its own, and how its weights reach the engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from limes.cluster.remote_engine import RayPeer
from limes.config import Config
from limes.weights import UpdateReport, WeightSource, build_sender, drain

if TYPE_CHECKING:
    from limes.cluster.ray_actor import RayActor
    from limes.models.policy import Policy
    from limes.training.worker import TrainWorker


class EngineFeed:
    """Hands weights to engines; a worker tells it of new ones as it tells an engine that shares its tensors.

    Args:
        engines: roles of engines; empty on ranks that hand nothing over.
        folder: for files.

    Attributes:
        source: gives the weights as they are.
    """

    def __init__(self, config: Config, policy: Policy, engines: Sequence[RayActor], folder: Path) -> None:
        settings = config.weights.model_copy(update={"transport": config.weight_transport()})
        self._sender = build_sender(settings, device=policy.device, folder=folder)
        self._peers = [RayPeer(engine) for engine in engines]
        # memory that engines have let go of is not where it was
        self._anew = "weight" in config.cluster.offload_rollout_level
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
    """A train worker with all its methods, and what a process of its own asks for beside them."""

    def __init__(self, worker: TrainWorker, feed: EngineFeed) -> None:
        self._worker, self._feed = worker, feed
        feed.source = worker.weight_source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def update_report(self) -> dict[str, float]:
        """Metrics of the latest hand-over."""
        return {} if self._feed.report is None else self._feed.report.metrics()

    def close(self) -> None:
        """Leave nothing behind."""
        self._feed.close()
