"""Ways to an engine's receiver: in this process, or over a multiprocessing pipe."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from limes.weights.messages import Message
from limes.weights.names import WeightError
from limes.weights.receiver import WeightReceiver

CLOSE_S = 10.0


class LocalPeer:
    """A receiver in this process; a message is carried out before `ask` returns."""

    def __init__(self, receiver: WeightReceiver, name: str = "engine") -> None:
        self.name, self._receiver = name, receiver

    def ask(self, message: Message) -> Future[Any]:
        """See `Peer.ask`."""
        answer: Future[Any] = Future()
        try:
            answer.set_result(self._receiver.handle(message))
        except Exception as error:  # noqa: BLE001 - handed to whoever asked
            answer.set_exception(error)
        return answer


class PipePeer:
    """A receiver behind a pipe, whose other end is in `serve_pipe`. Closing the pipe ends that."""

    def __init__(self, connection: Connection, name: str = "engine") -> None:
        self.name, self._connection = name, connection
        self._waiting: deque[Future[Any]] = deque()
        self._lock = threading.Lock()
        self._is_gone = False
        self._reader = threading.Thread(target=self._read, name=f"limes-{name}", daemon=True)
        self._reader.start()

    def ask(self, message: Message) -> Future[Any]:
        """See `Peer.ask`."""
        answer: Future[Any] = Future()
        with self._lock:
            if self._is_gone:
                answer.set_exception(self._gone())
                return answer
            self._waiting.append(answer)
            try:
                self._connection.send(message)
            except OSError:  # the reader finds the same, and settles all that waits
                pass
            except BaseException:
                self._waiting.remove(answer)
                raise
        return answer

    def close(self) -> None:
        """Close the pipe."""
        with self._lock:
            if not self._is_gone:
                self._connection.send(None)
        self._reader.join(CLOSE_S)
        self._connection.close()

    def _read(self) -> None:
        while True:
            try:
                is_error, value = self._connection.recv()
            except (EOFError, OSError):
                break
            answer = self._waiting.popleft()
            if is_error:
                answer.set_exception(value)
            else:
                answer.set_result(value)
        with self._lock:
            self._is_gone = True
            while self._waiting:
                self._waiting.popleft().set_exception(self._gone())

    def _gone(self) -> WeightError:
        return WeightError(f"{self.name} is gone: its process has ended or closed the pipe")


def serve_pipe(connection: Connection, handle: Callable[[Message], Any]) -> None:
    """Carry out messages from a `PipePeer` until it closes or its process ends."""
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            break
        if message is None:
            break
        try:
            answer = (False, handle(message))
        except WeightError as error:
            answer = (True, error)
        except Exception as error:  # noqa: BLE001 - handed to whoever asked; not every exception can be pickled
            answer = (True, WeightError(repr(error)))
        try:
            connection.send(answer)
        except OSError:
            break
    connection.close()
