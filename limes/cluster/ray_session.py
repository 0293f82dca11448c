"""Ray, for as long as a run needs it: started or joined, watched, and left as it was found."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from limes.cluster.layout import Layout, Slot, refuse_too_few
from limes.cluster.local import RoleEnded
from limes.cluster.ray_host import HostSettings, RoleHost
from limes.cluster.relay import Event, Replay
from limes.config import Config
from limes.run import Console

ADDRESS = "RAY_ADDRESS"
NICENESS = "RAY_worker_niceness"
MAX_CONCURRENCY = 10_000
POLL_S = 0.5


def require_ray() -> None:
    """Refuse to go on without Ray.

    Raises:
        ValueError: it is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise ValueError("cluster.kind = ray needs Ray, which is not installed: pip install 'limes[ray]'")


class RaySession:
    """A connection to Ray and the roles that run there.

    The first role that dies fails all calls of all roles, so that nothing waits for it.

    Args:
        run_folder: of the run; every node has to see it.
    """

    def __init__(self, config: Config, console: Console, run_folder: Path, layout: Layout) -> None:
        require_ray()
        import ray

        self._ray = ray
        self.config, self.console, self.run_folder = config, console, run_folder
        self._is_ours = not ray.is_initialized()
        self._group: Any = None
        self._actors: list[Any] = []
        self._replays: list[Replay] = []
        self._closing = False
        try:
            if self._is_ours:
                self._connect(layout)
            self.kind = self._slot_kind()
            refuse_too_few(config, layout, self._slots_of_nodes(), self.kind)
            self.slots = self._take(layout.num_slots)
        except BaseException:
            self.close()
            raise

    def host(
        self, name: str, slot: Slot | None, share: float, imports: Sequence[str] = (), parts: Sequence[str] = ()
    ) -> Any:
        """Start a process for a role in a slot, or anywhere near the driver; it takes part in the session's fate."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

        from limes.cluster.ray_actor import RayActor

        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": MAX_CONCURRENCY}
        if slot is None:
            here = self._ray.get_runtime_context().get_node_id()
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(here, soft=False)
        else:
            options["num_gpus" if self.kind == "GPU" else "num_cpus"] = share
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._group, slot.bundle)
        settings = HostSettings(
            self.run_folder.absolute(),
            os.getcwd(),
            tuple(map(os.path.abspath, sys.path)),
            num_threads(),
            tuple(imports),
        )
        actor = RayActor(name, self._ray.remote(RoleHost).options(**options).remote(name, settings), parts=parts)
        actor.on_death = self.fail
        self._actors.append(actor)
        self._listen(actor, Replay(self.console))
        return actor

    def locate(self, actors: Sequence[Any]) -> None:
        """Wait until the processes run, and note where.

        Raises:
            ValueError: they do not come up within `cluster.start_timeout_s`.
        """
        from ray.exceptions import RayActorError

        waiting = {actor.handle.describe.remote(): actor for actor in actors}
        limit = self.config.cluster.start_timeout_s
        with self.console.phase("start processes", len(waiting)) as phase:
            passed = 0.0
            while waiting:
                done, _ = self._ray.wait(list(waiting), timeout=POLL_S)
                for ref in done:
                    actor = waiting.pop(ref)
                    try:
                        actor.info = self._ray.get(ref)
                    except RayActorError as error:
                        raise RoleEnded(f"the process of role '{actor.name}' did not start: {error}") from error
                    phase.advance()
                passed += 0 if done else POLL_S
                if waiting and passed > limit:
                    names = ", ".join(actor.name for actor in waiting.values())
                    raise ValueError(
                        f"cluster.start_timeout_s = {limit:g}: the processes of {names} are not up by then; "
                        "raise it, or look into the cluster's logs"
                    )

    def fail(self, error: BaseException) -> None:
        """A role has died: nothing goes on without it."""
        for actor in self._actors:
            actor.fail(error)

    def close(self) -> None:
        """End all processes of the run, and Ray itself where the run has started it."""
        self._closing = True
        for actor in self._actors:
            actor.fail(RuntimeError(f"role '{actor.name}' has ended with the run"))
            self._ray.kill(actor.handle, no_restart=True)
        for replay in self._replays:
            replay.close()
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
            self._group = None
        if self._is_ours:
            self._ray.shutdown()

    def _connect(self, layout: Layout) -> None:
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        address = os.environ.get(ADDRESS)
        with self.console.phase("join Ray" if address else "start Ray", detail=address or ""), own_sigterm():
            if address:
                self._ray.init(address=address, **options)
            else:
                os.environ.setdefault(NICENESS, "0")  # Ray's own choice lets whatever else runs here go first
                num_cpus = max(os.cpu_count() or 1, layout.num_slots)
                self._ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **options)

    def _slot_kind(self) -> str:
        device, gpus = self.config.model.device, self._ray.cluster_resources().get("GPU", 0)
        if device == "cuda" and not gpus:
            raise ValueError("model.device = cuda, but the Ray cluster has no GPU; use model.device = auto or cpu")
        return "GPU" if gpus and device != "cpu" else "CPU"

    def _slots_of_nodes(self) -> list[int]:
        return [int(node["Resources"].get(self.kind, 0)) for node in self._ray.nodes() if node["Alive"]]

    def _take(self, num_slots: int) -> list[Slot]:
        """Reserve device slots, in the order of node and device."""
        bundle = {"CPU": 1.0} if self.kind == "CPU" else {"GPU": 1.0, "CPU": 1.0}
        self._group = self._ray.util.placement_group([dict(bundle) for _ in range(num_slots)], strategy="PACK")
        limit, passed = self.config.cluster.start_timeout_s, 0.0
        with self.console.phase("wait for devices", detail=f"{num_slots} x {self.kind}"):
            while not self._group.wait(POLL_S):
                passed += POLL_S
                if passed > limit:
                    free = self._ray.available_resources().get(self.kind, 0)
                    raise ValueError(
                        f"cluster.start_timeout_s = {limit:g}: {num_slots} {self.kind}s are not free by then, "
                        f"{free:g} are; wait for others to end, or ask for fewer"
                    )
        return sorted(self._found(num_slots))

    def _found(self, num_slots: int) -> list[Slot]:
        from ray.util import placement_group_table

        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        devices = range(num_slots) if self.kind == "CPU" else self._gpus(num_slots)
        return [Slot(f"{addresses[nodes[i]]} {nodes[i]}", device, i) for i, device in enumerate(devices)]

    def _gpus(self, num_slots: int) -> list[int]:
        """The GPU of each bundle, asked for there."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        probe = self._ray.remote(num_gpus=1, num_cpus=0)(gpu_of_this_task)
        strategies = [PlacementGroupSchedulingStrategy(self._group, i) for i in range(num_slots)]
        return self._ray.get([probe.options(scheduling_strategy=strategy).remote() for strategy in strategies])

    def _listen(self, actor: Any, replay: Replay) -> None:
        """Show what a role says, and learn of its death at once."""
        from ray.exceptions import RayActorError, RayError

        self._replays.append(replay)

        def heard(future: Future[list[Event]]) -> None:
            error = future.exception()
            if self._closing:
                return
            if error is None:
                replay.show(future.result())
                listen()
            elif isinstance(error, RayActorError):
                replay.close()
                actor.died(error)
            elif not isinstance(error, RayError):
                raise error

        def listen() -> None:
            actor.handle.listen.remote().future().add_done_callback(heard)

        listen()


def gpu_of_this_task() -> int:
    """The number of the GPU that Ray gave this task."""
    import ray

    return int(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])


def num_threads() -> int:
    """CPU threads of torch here."""
    import torch

    return torch.get_num_threads()


@contextmanager
def own_sigterm() -> Iterator[None]:
    """Keep what SIGTERM does: Ray's start would make it leave at once, with nothing disposed."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
