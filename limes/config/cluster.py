"""Settings of where roles run."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from limes.config.base import Section

OffloadLevel = Literal["kv_cache", "weight"]
LEVELS: tuple[OffloadLevel, ...] = ("kv_cache",)


class ClusterConfig(Section):
    """Where roles run. A "gpu" below is a device slot: a GPU, or on machines without GPUs one of Ray's CPUs."""

    kind: Literal["local", "ray"] = "local"
    """`local` runs every role in this process, each on its own thread; `ray` runs them as Ray actors: on a Ray of this
    machine that is started and ended with the run, or in the cluster that RAY_ADDRESS names."""

    num_threads: NonNegativeInt = 0
    """CPU threads of torch in each process; 0 leaves torch's choice."""

    actor_num_nodes: PositiveInt = 1
    """Machines that train the policy."""

    actor_num_gpus_per_node: PositiveInt = 1
    """Devices on each of them."""

    critic_num_nodes: PositiveInt | None = None
    """Machines that train the critic; default: as many as the actor's."""

    critic_num_gpus_per_node: PositiveInt | None = None
    """Devices on each of them; default: as many as the actor's."""

    rollout_num_gpus: PositiveInt | None = None
    """Devices that sample; default: all that train, or as many more as the actor has where `colocate` is false."""

    rollout_num_gpus_per_engine: PositiveInt = 1
    """Devices of one engine; the embedded engine takes 1."""

    colocate: bool = True
    """Engines use the devices that train; else they have devices of their own."""

    colocate_critic: bool = True
    """The critic trains on the actor's devices, before the actor; else it has devices of its own, and both train at the
    same time."""

    offload_rollout: bool | None = None
    """Engines let go of memory while the trainer works; default: where they are colocated."""

    offload_rollout_level: list[OffloadLevel] = Field(default_factory=lambda: list(LEVELS))
    """What they let go of, beside captured graphs. `weight` is for engines with weights of their own."""

    offload_train: bool | None = None
    """The trainer's weights, optimizer and gradients leave the device while engines work; default: on a GPU that it
    shares with engines of other processes. What is on a CPU goes into a file."""

    start_timeout_s: PositiveFloat = 600.0
    """Seconds that the cluster may take to provide devices and processes before the run ends."""

    debug_train_only: bool = False
    """Train on saved rollouts, `load_debug_rollout_data`, without engines."""

    debug_rollout_only: bool = False
    """Sample and grade without a trainer."""

    load_debug_rollout_data: str | None = None
    """A run folder whose saved rollouts are trained on, instead of sampling."""
