"""Which device slots each role gets. Numbers alone: nothing is started here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from limes.config import Config
from limes.config.counting import num_of

TRAIN_SHARE, ENGINE_SHARE = 0.4, 0.2
"""Of a slot: actor, critic and engine fit into one together."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Slots are numbered by (node, device).

    Attributes:
        num_slots: device slots of the run.
        actor, critic: the slot of each training rank; a rank can share its slot with one of the other model.
        engines: the slots of each engine.
    """

    num_slots: int
    actor: tuple[int, ...] = ()
    critic: tuple[int, ...] = ()
    engines: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """A device slot that the cluster has given."""

    node: str
    device: int
    bundle: int


def lay_out(config: Config) -> Layout:
    """Slots of all roles by the settings.

    Raises:
        ValueError: engines do not divide the slots; names setting, value and fix.
    """
    cluster = config.cluster
    num_actor = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    num_critic = _num_critic(config)
    own_critic = num_critic if num_critic and not cluster.colocate_critic else 0
    if num_critic and cluster.colocate_critic and num_critic != num_actor:
        raise ValueError(
            f"cluster.critic_num_nodes x cluster.critic_num_gpus_per_node = {num_critic}: a critic on the actor's "
            f"devices has as many ranks, {num_actor}; leave both out, or set cluster.colocate_critic to false"
        )
    if num_critic and not cluster.colocate_critic and num_critic != num_actor:
        raise ValueError(
            f"cluster.critic_num_nodes x cluster.critic_num_gpus_per_node = {num_critic}: each rank of the actor takes "
            f"the values of one of the critic, and the actor has {num_actor}; leave both out"
        )
    if cluster.debug_rollout_only:
        num_actor = num_critic = own_critic = 0
    num_train = num_actor + own_critic
    num_rollout = _num_rollout(config, num_train)
    first_engine = 0 if cluster.colocate else num_train
    critic_first = num_actor if own_critic else 0
    size = cluster.rollout_num_gpus_per_engine
    return Layout(
        num_slots=max(num_train, first_engine + num_rollout),
        actor=tuple(range(num_actor)),
        critic=tuple(range(critic_first, critic_first + num_critic)),
        engines=tuple(
            tuple(range(first, first + size)) for first in range(first_engine, first_engine + num_rollout, size)
        ),
    )


def _num_critic(config: Config) -> int:
    cluster = config.cluster
    if config.algorithm.advantage_estimator != "ppo":
        return 0
    nodes = cluster.critic_num_nodes or cluster.actor_num_nodes
    return nodes * (cluster.critic_num_gpus_per_node or cluster.actor_num_gpus_per_node)


def _num_rollout(config: Config, num_train: int) -> int:
    cluster = config.cluster
    if cluster.debug_train_only:
        return 0
    num_actor = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    default = num_train if cluster.colocate and num_train else num_actor
    num, size = cluster.rollout_num_gpus or default, cluster.rollout_num_gpus_per_engine
    if num % size:
        raise ValueError(
            f"cluster.rollout_num_gpus_per_engine = {size} does not divide the {num_of(num, 'device')} that sample; "
            f"set cluster.rollout_num_gpus to a multiple of {size}"
        )
    return num


def refuse_too_few(config: Config, layout: Layout, slots_of_nodes: Sequence[int], kind: str) -> None:
    """Compare with what the cluster has.

    Args:
        slots_of_nodes: device slots of each machine.
        kind: what a slot is: `GPU` or `CPU`.

    Raises:
        ValueError: the cluster is too small; names the numbers.
    """
    total = sum(slots_of_nodes)
    has = f"the cluster has {num_of(total, kind)} on {num_of(len(slots_of_nodes), 'node')}"
    if layout.num_slots > total:
        raise ValueError(
            f"the settings under cluster ask for {num_of(layout.num_slots, 'device')} ({describe(layout)}), and {has}; "
            "ask for fewer, or join a larger cluster with RAY_ADDRESS"
        )
    each = config.cluster.actor_num_gpus_per_node
    able = sum(slots >= each for slots in slots_of_nodes)
    if layout.actor and able < config.cluster.actor_num_nodes:
        raise ValueError(
            f"cluster.actor_num_nodes = {config.cluster.actor_num_nodes} with cluster.actor_num_gpus_per_node = "
            f"{each}: {has}, and {able} of them with {num_of(each, kind)} or more; ask for fewer"
        )


def describe(layout: Layout) -> str:
    """The roles and how many slots each has."""
    parts = [f"actor {len(layout.actor)}", f"critic {len(layout.critic)}"]
    parts.append(f"engines {sum(map(len, layout.engines))}")
    text = ", ".join(part for part in parts if not part.endswith(" 0"))
    shared = sum(map(len, (layout.actor, layout.critic, *layout.engines))) - layout.num_slots
    return f"{text}; {shared} shared" if shared > 0 else text
