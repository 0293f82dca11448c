"""Roles in this process: each on its own thread with its own event loop."""

from __future__ import annotations

import asyncio
import inspect
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from limes.cluster.ref import Ref, resolve


class RoleEnded(RuntimeError):
    """A role was asked for something after it had ended; the message names role and cause."""


@dataclass(slots=True)
class _Call:
    ref: Ref
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class LocalActor:
    """An object that lives on a worker thread and answers calls there.

    Calls start in the order they were made; a call whose arguments are refs waits for them, and so do the calls behind
    it. An `async` method runs beside the calls that follow it, an ordinary one keeps the thread until it returns.

    Args:
        name: Word for the role in errors.
        factory: Builds the role object on the worker thread; may be async, so that it can be ended half-way.
    """

    def __init__(self, name: str, factory: Callable[[], Any]) -> None:
        self.name = name
        self._factory = factory
        self._role: Any = None
        self._lock = threading.Lock()
        self._ended: str | None = None
        self._open: dict[int, Ref] = {}
        self._failed: list[Ref] = []
        self._loop = asyncio.new_event_loop()
        self._queue: asyncio.Queue[_Call] = asyncio.Queue()
        self._stop = asyncio.Event()
        self._ready = Ref(name, "start")
        self._track(self._ready)
        self._thread = threading.Thread(target=self._run, name=f"limes-{name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """The role object is built and takes calls."""
        return self._role is not None and self._ended is None

    @property
    def role(self) -> Any:
        """The role object, once it is built."""
        return self._role

    def ready(self) -> Ref:
        """Resolves when the role object is built; raises what its construction raised."""
        return self._ready

    def call(self, method: str, *args: Any, **kwargs: Any) -> Ref:
        """Start `role.method(*args, **kwargs)` on the worker thread, with refs among the arguments resolved first."""
        ref = Ref(self.name, method)
        for value in (*args, *kwargs.values()):
            if isinstance(value, Ref):
                value.mark_seen()  # its error reaches this call's ref
        with self._lock:
            if self._ended is None:
                self._track(ref)
                self._loop.call_soon_threadsafe(self._queue.put_nowait, _Call(ref, args, kwargs))
                return ref
        ref.set_error(RoleEnded(f"role '{self.name}' has ended ({self._ended}); it cannot run '{method}'"))
        return ref

    def close(self, deadline_s: float = 30.0) -> bool:
        """End the role: cancel its async calls, let an ordinary call finish, join the thread.

        Returns:
            False when the thread is still in a call after `deadline_s`; it then dies with the process.
        """
        self._end("closed")
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            warnings.warn(f"role '{self.name}' is still busy after {deadline_s:g} s; left behind", stacklevel=2)
            self._fail_open("closed while busy")
        for ref in self._failed:
            error = ref.unseen_error()
            if error is not None:
                warnings.warn(f"{ref.role}.{ref.method} failed and nobody asked: {error!r}", stacklevel=2)
        self._failed.clear()
        return not self._thread.is_alive()

    def _track(self, ref: Ref) -> None:
        self._open[id(ref)] = ref

    def _end(self, cause: str) -> None:
        with self._lock:
            if self._ended is None:
                self._ended = cause
                if not self._loop.is_closed():
                    self._loop.call_soon_threadsafe(self._stop.set)

    def _fail_open(self, cause: str) -> None:
        while self._open:
            _, ref = self._open.popitem()
            ref.set_error(RoleEnded(f"role '{self.name}' ended before '{ref.method}' did ({cause})"))
            ref.mark_seen()  # the one who ended the role knows

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())
        self._fail_open(self._ended or "closed")

    async def _serve(self) -> None:
        stopped = asyncio.create_task(self._stop.wait())
        life = asyncio.create_task(self._live())
        await asyncio.wait({stopped, life}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        life.cancel()

    async def _live(self) -> None:
        try:
            built = self._factory()
            self._role = await built if inspect.isawaitable(built) else built
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 (whoever awaits `ready` or any call gets it)
            self._end(f"it failed to start: {error!r}")
            self._settle(self._ready, error=error)
            return
        self._settle(self._ready, value=None)
        await self._answer()

    async def _answer(self) -> None:
        running: set[asyncio.Task[None]] = set()
        while True:
            call = await self._queue.get()
            try:
                args = [await resolve(value) for value in call.args]
                kwargs = {key: await resolve(value) for key, value in call.kwargs.items()}
                value = getattr(self._role, call.ref.method)(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 (delivered to the caller)
                self._settle(call.ref, error=error)
                continue
            except (KeyboardInterrupt, SystemExit) as error:
                self._end(f"'{call.ref.method}' raised {error!r}")
                self._settle(call.ref, error=RoleEnded(f"role '{self.name}' died in '{call.ref.method}': {error!r}"))
                return
            if inspect.isawaitable(value):
                task = asyncio.ensure_future(self._finish(call.ref, value))
                running.add(task)
                task.add_done_callback(running.discard)
            else:
                self._settle(call.ref, value=value)

    async def _finish(self, ref: Ref, outcome: Any) -> None:
        try:
            value = await outcome
        except asyncio.CancelledError:
            if not self._stop.is_set():  # otherwise the end of the role fails whatever is open
                self._settle(ref, error=RoleEnded(f"'{ref.method}' of role '{self.name}' was cancelled"))
            raise
        except Exception as error:  # noqa: BLE001 (delivered to the caller)
            self._settle(ref, error=error)
        else:
            self._settle(ref, value=value)

    def _settle(self, ref: Ref, *, value: Any = None, error: BaseException | None = None) -> None:
        self._open.pop(id(ref), None)
        if error is None:
            ref.set_result(value)
        else:
            self._failed.append(ref)
            ref.set_error(error)
