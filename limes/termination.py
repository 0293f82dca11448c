"""SIGTERM, from a scheduler or `kill`: the run ends as it does on Ctrl-C, with an exit code of its own."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

TERMINATED = 128 + signal.SIGTERM


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Let SIGTERM interrupt the block; yields whether it did.

    Only the main thread can take signals, and one that is ignored stays so.
    """
    came = threading.Event()

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        came.set()
        if callable(signal.getsignal(signal.SIGINT)):
            signal.raise_signal(signal.SIGINT)  # an event loop has its own way to end on it
        else:
            raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    if not is_main or before is signal.SIG_IGN:
        yield came.is_set
        return
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield came.is_set
    finally:
        signal.signal(signal.SIGTERM, before)
