"""A role in a process of its own, behind the interface of a `LocalActor`."""

from __future__ import annotations

import itertools
import threading
import uuid
import warnings
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from limes.cluster.local import RoleEnded
from limes.cluster.ray_host import Factory, Failure, HostInfo
from limes.cluster.ref import Ref, wait_for

CLOSE_S = 10.0
MAX_LOG_LINES = 12
TAIL_BYTES = 8192
TAIL_S = 5.0


class RayRef(Ref):
    """See `Ref`. As an argument it is resolved inside the cluster; only awaiting it brings the value here."""

    def __init__(self, role: str, method: str, value: Any) -> None:
        super().__init__(role, method)
        self.value = value

    @classmethod
    def of_part(cls, role: str, method: str, value: Any) -> RayRef:
        """A value that is there."""
        ref = cls(role, method, value)
        ref.set_result(None)
        return ref

    def __await__(self) -> Generator[Any, None, Any]:
        yield from super().__await__()
        return (yield from wait_for(self.future()))

    def future(self) -> Future[Any]:
        """The value, for those without an event loop."""
        return self.value.future()


class RayActor:
    """A role on Ray. It can be pickled: other roles may call it too.

    Args:
        name: word for the role in errors, with its rank.
        handle: of a `RoleHost`.
        parts: methods whose value is a list that stays in the cluster: refs to its items are what comes back.
    """

    def __init__(self, name: str, handle: Any, info: HostInfo | None = None, parts: Sequence[str] = ()) -> None:
        self.name, self.info = name, info
        self._handle, self._parts = handle, frozenset(parts)
        self._caller, self._numbers = uuid.uuid4().hex, itertools.count()
        self._lock = threading.Lock()
        self._open: dict[int, Ref] = {}
        self._failed: list[Ref] = []
        self._ended: BaseException | None = None
        self._is_dying = False
        self._ready: Ref | None = None
        self.on_death: Callable[[BaseException], None] = self.fail

    def __reduce__(self) -> tuple[Any, ...]:
        return RayActor, (self.name, self._handle, self.info, tuple(self._parts))

    @property
    def handle(self) -> Any:
        """Of the `RoleHost`."""
        return self._handle

    def free_port(self) -> tuple[str, int]:
        """An address of the process that others can meet at."""
        return ray.get(self._handle.free_port.remote())

    @property
    def alive(self) -> bool:
        """The role is built and takes calls."""
        return self._ended is None and self._ready is not None and self._ready.done() and self._ready.succeeded()

    def build(self, factory: Factory, *args: Any, environment: dict[str, str] | None = None) -> Ref:
        """Start to build the role; what `ready` gives."""
        self._ready = Ref(self.name, "start")
        self._watch(self._ready, self._handle.build.remote(factory, args, environment or {}))
        return self._ready

    def ready(self) -> Ref:
        """Resolves when the role is built; raises what its construction raised."""
        assert self._ready is not None, "built first"
        return self._ready

    def call(self, method: str, *args: Any, **kwargs: Any) -> Ref:
        """Start `role.method(*args, **kwargs)`, with refs among the arguments resolved first, inside the cluster."""
        values = [self._portable(value) for value in (*args, *kwargs.values())]
        parts = method in self._parts
        with self._lock:
            if self._ended is not None:
                ended = Ref(self.name, method)
                ended.set_error(again(self._ended))
                return ended
            status, value = self._handle.call.options(num_returns=2).remote(
                self._caller, next(self._numbers), parts, method, list(kwargs), *values
            )
        ref = RayPartsRef(self.name, method, value) if parts else RayRef(self.name, method, value)
        self._watch(ref, status)
        return ref

    def call_for_future(self, method: str, *args: Any) -> Future[Any]:
        """Like `call`, for those without an event loop."""
        ref, found = self.call(method, *args), Future[Any]()

        def arrived(future: Future[Any]) -> None:
            error = future.exception()
            if error is not None:
                found.set_exception(error)
            elif future is ref.status:
                assert isinstance(ref, RayRef)
                ref.future().add_done_callback(arrived)
            else:
                found.set_result(future.result())

        ref.mark_seen()
        ref.status.add_done_callback(arrived)
        return found

    def close(self) -> bool:
        """End the role and its process; one that is not built yet is not waited for."""
        if self.alive:
            try:
                ray.get(self._handle.close.remote(), timeout=CLOSE_S)
            except GetTimeoutError:
                warnings.warn(f"role '{self.name}' is still busy after {CLOSE_S:g} s; killed", stacklevel=2)
            except RayError as error:
                warnings.warn(f"role '{self.name}' did not close: {error}", stacklevel=2)
        self.fail(RoleEnded(f"role '{self.name}' has ended (closed)"))
        ray.kill(self._handle, no_restart=True)
        for ref in self._failed:
            unseen = ref.unseen_error()
            if unseen is not None:
                warnings.warn(f"{ref.role}.{ref.method} failed and nobody asked: {unseen!r}", stacklevel=2)
        self._failed.clear()
        return True

    def fail(self, error: BaseException) -> None:
        """The role is gone: whatever is open fails, and so does what is asked from now on."""
        with self._lock:
            if self._ended is not None:
                return
            self._ended = error
            refs = list(self._open.values())
            self._open.clear()
        for ref in refs:
            ref.set_error(again(error))

    def died(self, cause: RayActorError) -> None:
        """Find out what can be known of a death, on a thread of its own, and tell it."""
        with self._lock:
            if self._is_dying or self._ended is not None:
                return
            self._is_dying = True
        threading.Thread(target=self._post_mortem, args=(cause,), name="limes-post-mortem", daemon=True).start()

    def _post_mortem(self, cause: RayActorError) -> None:
        self.on_death(RoleEnded(f"role '{self.name}' has died{describe_place(self.info)}: {why(cause)}{self._tail()}"))

    def _tail(self) -> str:
        if self.info is None or not self.info.log:
            return ""
        try:
            lines = last_lines(self.info)
        except (RayError, OSError) as error:
            return f"; its log {self.info.log} cannot be read: {error!r}"
        text = "\n".join(f"  {line}" for line in lines) or "  (nothing)"
        return f"\nlast lines of its log {self.info.log}:\n{text}"

    def _portable(self, value: Any) -> Any:
        if isinstance(value, RayRef):
            value.mark_seen()  # its error reaches the ref of the call
            return value.value
        assert not isinstance(value, Ref), "a ref of another kind of cluster"
        return value

    def _watch(self, ref: Ref, status: Any) -> None:
        with self._lock:
            self._open[id(ref)] = ref

        def settled(future: Future[Any]) -> None:
            error = future.exception()
            if isinstance(error, RayActorError):
                self.died(error)  # settles whatever is open
                with self._lock:
                    ended = self._ended
                if ended is not None:  # it was settled before this call was noted
                    ref.set_error(again(ended))
                return
            with self._lock:
                self._open.pop(id(ref), None)
            failure = future.result() if error is None else Failure(error)
            if failure is None:
                ref.set_result(None)
            else:
                self._failed.append(ref)
                ref.set_error(failure.error)

        status.future().add_done_callback(settled)


class RayPartsRef(RayRef):
    """Delivers a list of refs."""

    def __await__(self) -> Generator[Any, None, Any]:
        parts = yield from super().__await__()
        return [RayRef.of_part(self.role, self.method, part) for part in parts]


def again(error: BaseException) -> BaseException:
    """The same error for one more call: each is marked with its own."""
    return type(error)(*error.args)


def describe_place(info: HostInfo | None) -> str:
    """Node and process, for messages."""
    return "" if info is None else f" on node {info.host} (process {info.process_id})"


def why(cause: RayActorError) -> str:
    """The first sentence of Ray's explanation."""
    text = str(cause)
    for mark in ("Worker exit detail: ", "The actor is dead because "):
        if mark in text:
            text = text.partition(mark)[2]
            break
    return text.partition(". Some common causes")[0].strip().splitlines()[0]


def last_lines(info: HostInfo) -> list[str]:
    """The end of a role's log, read on its own node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if info.node_id == ray.get_runtime_context().get_node_id():
        return tail(info.log)
    strategy = NodeAffinitySchedulingStrategy(info.node_id, soft=False)
    remote = ray.remote(tail).options(num_cpus=0, scheduling_strategy=strategy, max_retries=0)
    return ray.get(remote.remote(info.log), timeout=TAIL_S)


def tail(path: str) -> list[str]:
    """The last lines of a file."""
    with open(path, "rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - TAIL_BYTES))
        lines = file.read().decode("utf-8", "backslashreplace").splitlines()
    return [line for line in lines if line.strip() and not line.startswith(":")][-MAX_LOG_LINES:]
