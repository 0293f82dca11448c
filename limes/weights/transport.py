"""What a way to hand weights over has to do, and how it talks to engines."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from limes.weights.messages import Message
from limes.weights.names import Specs, WeightError
from limes.weights.receiver import EngineState
from limes.weights.source import WeightSource


class Peer(Protocol):
    """The trainer's way to one engine's `WeightReceiver`: a pipe, a Ray handle, or the receiver itself."""

    @property
    def name(self) -> str:
        """For messages to people."""
        ...

    def ask(self, message: Message) -> Future[Any]:
        """Deliver a message; messages are carried out in the order they were asked. A dead engine is an error."""
        ...


@dataclass(frozen=True, slots=True)
class Sent:
    """What a transport moved: bytes to each engine, and the share of words that changed if it knows."""

    num_bytes: int
    density: float | None = None


class Transport(Protocol):
    """One way to hand weights over."""

    kind: str

    def connect(self, specs: Specs, peers: Sequence[Peer], states: Sequence[EngineState]) -> None:
        """Make ready for updates to these engines."""
        ...

    def prepare(self, source: WeightSource, version: int) -> None:
        """What can be done while engines still sample."""
        ...

    def send(self, source: WeightSource, version: int) -> Sent:
        """Hand over; the engines stand still. On return every engine has all weights."""
        ...

    def limit_bytes_per_s(self) -> float | None:
        """What the medium could carry, measured on this machine; None where nothing moves."""
        ...

    def close(self) -> None:
        """Leave nothing behind: no file, memory or process group."""
        ...


def ask_all(peers: Sequence[Peer], message: Message, timeout_s: float) -> list[Any]:
    """Ask all engines at once, and give their answers in order.

    Raises:
        WeightError: an engine failed or took too long; names it.
    """
    return wait_all(peers, [peer.ask(message) for peer in peers], type(message).__name__, timeout_s)


def wait_all(peers: Sequence[Peer], answers: Iterable[Future[Any]], what: str, timeout_s: float) -> list[Any]:
    """Answers that were asked for before, in order; see `ask_all`."""
    deadline = time.monotonic() + timeout_s
    found = []
    for peer, answer in zip(peers, answers, strict=True):
        try:
            found.append(answer.result(max(0.0, deadline - time.monotonic())))
        except TimeoutError as error:
            raise WeightError(f"{peer.name} did not answer {what} within {timeout_s:g} s") from error
        except WeightError as error:
            raise WeightError(f"{peer.name}: {error}") from error
        except Exception as error:
            raise WeightError(f"{peer.name} failed in {what}: {error!r}") from error
    return found
