"""Where each role lives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from limes.config import Config
from limes.run.tracking import Tracking

if TYPE_CHECKING:
    from limes.cluster.ray_actor import RayActor
    from limes.cluster.ray_session import RaySession
    from limes.engine.embedded.engine import EmbeddedEngine
    from limes.models.policy import Policy


@dataclass(slots=True)
class SharedModel:
    """The one copy of the weights that trainer and engine of a process use: filled by the role that starts first."""

    policy: Policy | None = None
    engine: EmbeddedEngine | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """A role's place.

    Attributes:
        shared: in this process: the model that all roles share.
        processes: on Ray: that of each rank; for `rollout` the manager's, then that of each engine.
    """

    role: str
    shared: SharedModel = field(default_factory=SharedModel)
    processes: Sequence[RayActor] = ()


class Placements:
    """The places of all roles, by name: `rollout`, `actor`, `critic`."""

    def __init__(self, places: Mapping[str, Placement], session: RaySession | None = None) -> None:
        self._places, self._session = dict(places), session

    def __getitem__(self, role: str) -> Placement:
        return self._places[role]

    def close(self) -> None:
        """Give all places back; whatever still runs there ends."""
        if self._session is not None:
            self._session.close()


def create_placement_groups(config: Config, tracking: Tracking) -> Placements:
    """A place for each role; nothing is loaded yet.

    Raises:
        ValueError: the cluster has not what the settings ask for.
    """
    if config.cluster.kind == "ray":
        return _places_on_ray(config, tracking)
    shared = SharedModel()
    return Placements({role: Placement(role, shared) for role in ("rollout", "actor", "critic")})


def _places_on_ray(config: Config, tracking: Tracking) -> Placements:
    from limes.cluster.layout import ENGINE_SHARE, TRAIN_SHARE, lay_out
    from limes.cluster.ray_session import RaySession

    layout = lay_out(config)
    session = RaySession(config, tracking.console, tracking.folder.path, layout)
    try:
        engine, worker = ("limes.models.load", "limes.engine.embedded.engine"), ("limes.training.worker",)
        manager = session.host("rollout", None, 0, ("limes.rollout",), parts=("generate",))
        engines = [
            session.host(f"engine rank {rank}", session.slots[slots[0]], ENGINE_SHARE, engine)
            for rank, slots in enumerate(layout.engines)
        ]
        workers = {
            role: [
                session.host(f"{role} rank {rank}", session.slots[slot], TRAIN_SHARE, worker)
                for rank, slot in enumerate(slots)
            ]
            for role, slots in (("actor", layout.actor), ("critic", layout.critic))
        }
        session.locate([manager, *engines, *workers["actor"], *workers["critic"]])
    except BaseException:
        session.close()
        raise
    processes = {"rollout": [manager, *engines], **workers}
    return Placements({role: Placement(role, processes=own) for role, own in processes.items()}, session)
