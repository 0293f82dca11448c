"""A console for roles in other processes: what they say is kept until the driver fetches and shows it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

from limes.run import Console
from limes.run.progress import Phase

GATHER_S = 0.1


@dataclass(frozen=True, slots=True)
class Event:
    """Something to show. `key` names a phase; `total`, `done` and `at_once` are its numbers."""

    kind: Literal["notice", "warn", "begin", "changed", "end"]
    text: str = ""
    key: int = 0
    detail: str = ""
    total: int | None = None
    done: int = 0
    at_once: int = 1


class Outbox:
    """Events that wait to be fetched; any thread adds, one event loop fetches."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._changed: dict[int, Event] = {}
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def add(self, event: Event) -> None:
        """Keep an event. Of a phase's progress only the latest is kept."""
        with self._lock:
            if event.kind == "changed":
                self._changed[event.key] = event
            else:
                last = self._changed.pop(event.key, None) if event.kind == "end" else None
                self._events.extend(item for item in (last, event) if item is not None)
            waiter = self._waiter
        if waiter is not None:
            loop, arrived = waiter
            if not loop.is_closed():
                loop.call_soon_threadsafe(arrived.set)

    async def fetch(self) -> list[Event]:
        """Wait until there is something, and a moment longer for what comes with it."""
        arrived = asyncio.Event()
        with self._lock:
            self._waiter = (asyncio.get_running_loop(), arrived)
            if self._events or self._changed:
                arrived.set()
        await arrived.wait()
        await asyncio.sleep(GATHER_S)
        return self.take()

    def take(self) -> list[Event]:
        """All that is there."""
        with self._lock:
            self._waiter = None
            events, self._events = [*self._events, *self._changed.values()], []
            self._changed = {}
        return events


class _RelayReporter:
    """Passes phases on."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def begin(self, phase: Phase) -> None:
        self._outbox.add(_event("begin", phase))

    def changed(self, phase: Phase) -> None:
        self._outbox.add(_event("changed", phase))

    def end(self, phase: Phase, outcome: str) -> None:
        self._outbox.add(Event("end", outcome, id(phase), total=phase.total, done=phase.done))

    def close(self) -> None:
        """Nothing to leave behind."""


def _event(kind: Literal["begin", "changed"], phase: Phase) -> Event:
    return Event(kind, phase.name, id(phase), phase.detail, phase.total, phase.done, phase.at_once)


class RelayConsole(Console):
    """A console without a terminal."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        self._outbox = outbox
        self._reporter = _RelayReporter(outbox)

    def notice(self, text: str) -> None:
        """See `Console.notice`."""
        self._outbox.add(Event("notice", text))

    def warn(self, text: str) -> None:
        """See `Console.warn`."""
        self._outbox.add(Event("warn", text))


class Replay:
    """Shows fetched events on the driver's console; one for each role."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._phases: dict[int, tuple[AbstractContextManager[Phase], Phase]] = {}

    def show(self, events: Sequence[Event]) -> None:
        """Show events in order."""
        for event in events:
            if event.kind == "notice":
                self._console.notice(event.text)
            elif event.kind == "warn":
                self._console.warn(event.text)
            elif event.kind == "begin":
                opened: AbstractContextManager[Phase] = self._console.phase(
                    event.text, event.total, detail=event.detail, at_once=event.at_once
                )
                self._phases[event.key] = (opened, opened.__enter__())
            elif event.key in self._phases:
                opened, phase = self._phases[event.key]
                phase.update(event.done, event.total)
                if event.kind == "end":
                    del self._phases[event.key]
                    _leave(opened, event.text)

    def close(self) -> None:
        """End what the role can no longer end."""
        while self._phases:
            _, (opened, _) = self._phases.popitem()
            _leave(opened, "stopped")


def _leave(opened: AbstractContextManager[Phase], outcome: str) -> None:
    """Leave a phase as the role did: `done`, `failed` or `stopped`."""
    error: BaseException | None = None
    if outcome != "done":
        error = RuntimeError(outcome) if outcome == "failed" else asyncio.CancelledError()
    opened.__exit__(None if error is None else type(error), error, None)
