"""Who lets go of device memory when."""

from __future__ import annotations

from dataclasses import dataclass

from limes.config import Config

TAGS = {"kv_cache": "kv_cache", "weight": "weights"}
"""Words of `cluster.offload_rollout_level` and the engine's tags."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What leaves the device in a step.

    Attributes:
        rollout_tags: what engines let go of while the trainer works; empty where they keep everything.
        offload_train: the trainer leaves while engines work.
    """

    rollout_tags: tuple[str, ...]
    offload_train: bool

    @property
    def offload_rollout(self) -> bool:
        """Engines let go of something."""
        return bool(self.rollout_tags)


def memory_plan(config: Config) -> MemoryPlan:
    """The plan by the settings under `cluster`."""
    from limes.models.load import pick_device

    cluster = config.cluster
    rollout = cluster.colocate if cluster.offload_rollout is None else cluster.offload_rollout
    tags = tuple(TAGS[level] for level in TAGS if level in cluster.offload_rollout_level)
    train = cluster.offload_train
    if train is None:
        train = cluster.kind == "ray" and cluster.colocate and pick_device(config.model.device).type == "cuda"
    return MemoryPlan(("cuda_graph", *tags) if rollout else (), train)
