"""Where each role lives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from limes.config import Config

if TYPE_CHECKING:
    from limes.engine.embedded.engine import EmbeddedEngine
    from limes.models.policy import Policy


@dataclass(slots=True)
class SharedModel:
    """The one copy of the weights that trainer and engine of a process use: filled by the role that starts first."""

    policy: Policy | None = None
    engine: EmbeddedEngine | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """A role's place in this process: a thread of its own, and the model it shares with the others."""

    role: str
    shared: SharedModel


def create_placement_groups(config: Config) -> dict[str, Placement]:
    """A place for each role; nothing is loaded yet."""
    assert config.cluster.kind == "local", config.cluster.kind
    shared = SharedModel()
    return {role: Placement(role, shared) for role in ("rollout", "actor", "critic")}
