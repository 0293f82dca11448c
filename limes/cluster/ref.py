"""A value that a role will deliver."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator
from concurrent.futures import Future
from typing import Any, Protocol


class Ref:
    """The outcome of one call to a role: await it from any event loop, any number of times, or pass it as an argument.

    A failed call raises its own exception wherever the ref is awaited, with a note that names the role and the call.
    Cancelling an await leaves the call running.
    """

    def __init__(self, role: str, method: str) -> None:
        self.role = role
        self.method = method
        self._future: Future[Any] = Future()
        self._seen = False

    def __repr__(self) -> str:
        state = "pending" if not self._future.done() else "failed" if self._future.exception() else "done"
        return f"Ref({self.role}.{self.method}, {state})"

    def __await__(self) -> Generator[Any, None, Any]:
        self.mark_seen()
        return (yield from wait_for(self._future))

    @property
    def status(self) -> Future[Any]:
        """Done when the call has ended; has its error, if it failed."""
        return self._future

    def done(self) -> bool:
        """Whether the call has ended, well or not."""
        return self._future.done()

    def succeeded(self) -> bool:
        """Whether the call has ended well."""
        return self._future.done() and self._future.exception() is None

    def settled(self) -> Awaitable[None]:
        """Waits until the call has ended, without fetching its value; raises its error."""
        return _Settled(self, self._future)

    def mark_seen(self) -> None:
        """Somebody will get this call's error: an awaiter, or a call that takes this ref as an argument."""
        self._seen = True

    def unseen_error(self) -> BaseException | None:
        """The error of a call that nobody awaited or passed on."""
        return None if self._seen or not self._future.done() else self._future.exception()

    def set_result(self, value: Any) -> None:
        """Deliver the value; a call that has already ended stays as it is."""
        if not self._future.done():
            self._future.set_result(value)

    def set_error(self, error: BaseException) -> None:
        """Deliver a failure, marked with role and call; a call that has already ended stays as it is."""
        if not self._future.done():
            note = f"(in role '{self.role}', call '{self.method}')"
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            self._future.set_exception(error)


class Actor(Protocol):
    """A role that takes calls, wherever it runs."""

    name: str

    @property
    def alive(self) -> bool:
        """The role is built and takes calls."""
        ...

    def ready(self) -> Ref:
        """Resolves when the role is built; raises what its construction raised."""
        ...

    def call(self, method: str, *args: Any, **kwargs: Any) -> Ref:
        """Start `role.method(*args, **kwargs)`, with refs among the arguments resolved first."""
        ...

    def close(self) -> bool:
        """End the role."""
        ...


class _Settled:
    def __init__(self, ref: Ref, future: Future[Any]) -> None:
        self._ref, self._future = ref, future

    def __await__(self) -> Generator[Any, None, None]:
        self._ref.mark_seen()
        yield from wait_for(self._future)


def wait_for(future: Future[Any]) -> Generator[Any, None, Any]:
    """The body of an `__await__`: what a thread's future delivers. A cancelled wait leaves the future alone."""
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def wake(_: Future[Any]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(lambda: None if waiter.done() else waiter.set_result(None))

    future.add_done_callback(wake)
    yield from waiter.__await__()
    return future.result()


async def resolve(value: Any) -> Any:
    """The value itself, or what a ref delivers."""
    return await value if isinstance(value, Ref) else value
