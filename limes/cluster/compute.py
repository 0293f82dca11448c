"""One thread for the tensor work of a process.

OpenMP keeps a pool of workers for every thread that has computed and still lives. With more workers than cores they
sleep between operations instead of spinning, and each of the hundreds of small operations of a decode step then waits
for them to wake: a fifth of its time. So all roles of a process compute on the engine's thread.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class ComputeThread(Protocol):
    """Whoever owns the thread."""

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` there, in the order it was asked for."""
        ...


class OnThread:
    """A role whose ordinary methods run on a compute thread; awaitable ones run where they are called."""

    def __init__(self, role: Any, thread: ComputeThread) -> None:
        self._role, self._thread = role, thread

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._role, name)
        return method if inspect.iscoroutinefunction(method) else partial(self._call, method)

    async def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await self._thread.run(partial(method, *args, **kwargs))


async def on_a_passing_thread(work: Callable[[], T]) -> T:
    """Run `work` on a thread that ends with it, and whose workers end too."""
    with ThreadPoolExecutor(1, thread_name_prefix="passing") as pool:
        return await asyncio.wrap_future(pool.submit(work))
