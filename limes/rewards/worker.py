"""The process that handles model output: `python -m limes.rewards.worker SCORER MEMORY_MB PARENT_PID`.

SCORER is a module whose `load()` returns a function from a request to a number.

The parent talks to it over one socket, which is its standard input and output: a request is 8 bytes of length and a
pickle, a reply is one line of JSON. Replies are never unpickled, so nothing in here can reach the parent.

It outlives no one: it ends when the socket closes or its parent is gone. While it works two signals of the kernel end
it, even inside a computation that never returns to Python: SIGIO when the other end of the socket closes (Linux), and
an alarm soon after the request's limit.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import logging
import os
import pickle
import select
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

from limes.rewards import guard

ALARM_GRACE_S = 1.0
ORPHAN_CHECK_S = 5.0

Score = Callable[[dict[str, Any]], float]


def main(scorer: str, memory_mb: int, parent: int) -> None:
    """Load a scorer, say so, then answer requests until the parent goes away.

    A process that has grown by half of what it may says so with its reply and is replaced: what it keeps must not
    starve the answers to come.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # whatever the parent has made of it
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    logging.disable(logging.CRITICAL)
    requests, replies = _take_socket()
    try:
        score: Score = importlib.import_module(scorer).load()
        guard.limit_resources(memory_mb)
        guard.lock_down()
    except Exception as error:  # noqa: BLE001 (the parent reports it)
        _reply(replies, {"fault": f"{type(error).__name__}: {error}"})
        return
    _reply(replies, {"ready": True})
    room = guard.address_space() + memory_mb * 2**19
    while (request := _next_request(requests, parent)) is not None:
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"] + ALARM_GRACE_S)
        reply = _answer(score, request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGIO, signal.SIG_IGN)
        reply["retire"] = guard.address_space() > room
        _reply(replies, reply)


def _take_socket() -> tuple[BinaryIO, BinaryIO]:
    """The parent's socket as two streams; libraries that print do so on standard error.

    From here on the kernel sends SIGIO when something happens at the socket. While a request is worked on that can only
    be its end; at other times the signal is ignored.
    """
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
    requests, replies = os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return requests, replies


def _next_request(requests: BinaryIO, parent: int) -> dict[str, Any] | None:
    """The next request; None when there will be none."""
    while not select.select([requests], [], [], ORPHAN_CHECK_S)[0]:
        if os.getppid() != parent:
            return None
    header = _read(requests, 8)
    if len(header) < 8:
        return None
    body = _read(requests, int.from_bytes(header, "big"))
    try:
        return pickle.loads(body)
    except Exception as error:  # noqa: BLE001 (such as an object of a module that only the parent has)
        return {"timeout_s": 0.0, "unreadable": f"{type(error).__name__}: {error}"}


def _read(requests: BinaryIO, num_bytes: int) -> bytearray:
    parts = bytearray()
    while len(parts) < num_bytes and (part := requests.read(num_bytes - len(parts))):
        parts += part
    return parts


def _answer(score: Score, request: dict[str, Any]) -> dict[str, Any]:
    if "unreadable" in request:
        return {"fault": f"the request cannot be read in the worker process ({request['unreadable']})"}
    try:
        return {"value": float(score(request))}
    except MemoryError:
        return {"memory": True}
    except Exception as error:  # noqa: BLE001 (the parent counts it)
        return {"fault": f"{type(error).__name__}: {error}"[:500]}


def _reply(replies: BinaryIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
