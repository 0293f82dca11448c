"""Killable processes that handle model output, seen from the side that uses them.

A call works from any thread. A process that runs out of time is killed and the next call starts another; one that dies
is replaced and the call repeated once. Processes start when first needed and none outlives its pool, see `worker.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import IO, Any

from limes.rewards.grade import GraderError, TimedOut

START_LIMIT_S = 120.0
MEMORY_MB = 1024
FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class WorkerDied(GraderError):
    """The process ended while it worked. `own_fault`: by itself, not by a signal that others send."""

    def __init__(self, message: str, *, own_fault: bool) -> None:
        super().__init__(message)
        self.own_fault = own_fault


class OutOfMemory(GraderError):
    """The computation needed more memory than the process may have."""


class WorkerProcess:
    """One process. Only one thread may call it at a time; `kill` may come from any."""

    def __init__(self, scorer: str, memory_mb: int) -> None:
        self._scorer = scorer
        self._memory_mb = memory_mb
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._stderr: IO[bytes] | None = None
        self._owner = os.getpid()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Id of the running process, or None."""
        return self._process.pid if self._process is not None else None

    def call(self, request: Mapping[str, Any], timeout_s: float) -> float:
        """Let the process score a request; starting it first does not count towards the limit.

        Raises:
            TimedOut: no answer in time; the process is gone.
            OutOfMemory: the computation did not fit.
            WorkerDied: the process ended.
            GraderError: the scorer raised, or the process does not start.
        """
        body = pickle.dumps({**request, "timeout_s": timeout_s})
        connection = self._running()
        try:
            deadline = time.monotonic() + timeout_s
            connection.settimeout(timeout_s)
            connection.sendall(len(body).to_bytes(8, "big") + body)
            reply = self._receive(connection, deadline)
        except TimeoutError:
            self.kill()
            raise TimedOut(f"no result within {timeout_s:g} s") from None
        except OSError as error:
            raise self._death(str(error)) from error
        except BaseException:
            self.kill()  # interrupted: its reply must not be taken for that of the next request
            raise
        if reply.get("retire"):
            self.kill()
        if "memory" in reply:
            raise OutOfMemory(f"more than {self._memory_mb} MB needed")
        if "fault" in reply:
            raise GraderError(reply["fault"])
        return float(reply["value"])

    def kill(self) -> None:
        """End the process and reap it. Does nothing in a process that was forked from the one that started it."""
        with self._lock:
            process, connection, stderr = self._process, self._socket, self._stderr
            self._process = self._socket = self._stderr = None
        if connection is not None:
            connection.close()
        if stderr is not None:
            stderr.close()
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.wait()

    def close(self) -> None:
        """End the process for good."""
        self._closed = True
        self.kill()

    def _running(self) -> socket.socket:
        """The connection to the process, which is started if it does not run."""
        if self._owner != os.getpid():
            self.kill()
            self._owner = os.getpid()
        if self._process is not None and self._process.poll() is not None:
            self.kill()
        if self._socket is None:
            self._start()
        connection = self._socket
        if self._closed or connection is None:
            self.kill()
            raise GraderError("the grader is closed")
        return connection

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by kill)
        command = [
            sys.executable,
            "-P",
            "-m",
            "limes.rewards.worker",
            self._scorer,
            str(self._memory_mb),
            str(os.getpid()),
        ]
        paths = os.pathsep.join(path for path in sys.path if path)
        with theirs:
            process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=stderr,
                env={**os.environ, **ONE_THREAD, "PYTHONPATH": paths},
                start_new_session=True,
            )
        with self._lock:
            self._process, self._socket, self._stderr = process, ours, stderr
        try:
            reply = self._receive(ours, time.monotonic() + START_LIMIT_S)
        except TimeoutError:
            self.kill()
            raise GraderError(f"the {self._scorer} process did not start within {START_LIMIT_S:g} s") from None
        except OSError as error:
            raise GraderError(f"the {self._scorer} process does not start: {self._death(str(error))}") from error
        except BaseException:
            self.kill()
            raise
        if "fault" in reply:
            self.kill()
            raise GraderError(f"the {self._scorer} process does not start: {reply['fault']}")

    def _receive(self, connection: socket.socket, deadline: float) -> dict[str, Any]:
        """One reply. TimeoutError when it is late, another OSError when the process is gone."""
        line = bytearray()
        while not line.endswith(b"\n"):
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            part = connection.recv(65536)
            if not part:
                raise ConnectionError("the connection ended")
            line += part
        reply = json.loads(line)
        assert isinstance(reply, dict)
        return reply

    def _death(self, details: str) -> GraderError:
        """Say how the process ended, and clean up after it."""
        process, stderr = self._process, self._stderr
        if process is None or stderr is None:
            return WorkerDied("the grader was closed", own_fault=False)
        try:
            code = process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self.kill()
            return WorkerDied(f"the {self._scorer} process broke off ({details})", own_fault=False)
        last_words = _tail(stderr)
        self.kill()
        if code == -signal.SIGALRM:
            return TimedOut("the process ended itself at its time limit")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return WorkerDied(
            f"the {self._scorer} process ended with {how}{last_words}", own_fault=code >= 0 or -code not in FROM_OUTSIDE
        )


def _tail(stderr: IO[bytes]) -> str:
    """The last line that a process wrote to its standard error."""
    try:
        stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - 2000))
        lines = stderr.read().decode(errors="replace").split("\n")
    except ValueError:  # closed meanwhile
        return ""
    return next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")


class WorkerPool:
    """Several processes that score alike.

    Args:
        scorer: the module that scores, see `worker.py`.
        num_workers: how many there are at most.
        memory_mb: how much memory a computation may take.
    """

    def __init__(self, scorer: str, num_workers: int = 1, memory_mb: int = MEMORY_MB) -> None:
        self._workers = [WorkerProcess(scorer, memory_mb) for _ in range(num_workers)]
        self._idle: queue.LifoQueue[WorkerProcess] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix=f"limes-{scorer}")
        self._finalizer = weakref.finalize(self, _close_all, self._workers)

    @property
    def pids(self) -> list[int]:
        """Ids of the running processes."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    def call(self, request: Mapping[str, Any], timeout_s: float) -> float:
        """Score a request, waiting for a free process; for the errors see `WorkerProcess.call`.

        A process that dies over a request is replaced and gets the request once more, as it may have been killed by
        something else.
        """
        worker = self._idle.get()
        try:
            try:
                return worker.call(request, timeout_s)
            except WorkerDied:
                return worker.call(request, timeout_s)
        finally:
            self._idle.put(worker)

    async def call_async(self, request: Mapping[str, Any], timeout_s: float) -> float:
        """`call` without blocking the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(self.call, request, timeout_s))

    def close(self) -> None:
        """End all processes; calls that are under way or come later get a `GraderError`."""
        self._finalizer()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _close_all(workers: list[WorkerProcess]) -> None:
    for worker in workers:
        worker.close()
