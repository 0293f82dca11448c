"""Things that belong to the event loop they were made in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerLoop(Generic[T]):
    """Makes a thing when first asked for, and another one when a different event loop asks."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: tuple[asyncio.AbstractEventLoop, T] | None = None

    def get(self) -> T:
        """The running loop's thing."""
        loop = asyncio.get_running_loop()
        if self._made is None or self._made[0] is not loop:
            self._made = (loop, self._make())
        return self._made[1]

    def pop(self) -> T | None:
        """Give up the running loop's thing, if there is one."""
        made, self._made = self._made, None
        return made[1] if made is not None and made[0] is asyncio.get_running_loop() else None
