"""Progress of long phases: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import atexit
import re
import threading
import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.text import Text

PLAIN_INTERVAL_S = 10.0
REFRESHES_PER_S = 4


class Phase:
    """A stretch of work and how much of it is done. Any thread may move it; after its end that has no effect."""

    def __init__(
        self, name: str, total: int | None, detail: str, changed: Callable[[Phase], None], at_once: int = 1
    ) -> None:
        """Start counting at 0 of `total` (None: unknown), with `at_once` of them worked on at the same time."""
        self.name = name
        self.total = total
        self.detail = detail
        self.at_once = at_once
        self.done = 0
        self._changed = changed
        self._lock = threading.Lock()

    @property
    def title(self) -> str:
        """Name and detail in one."""
        return f"{self.name} {self.detail}".rstrip()

    def advance(self, n: int = 1) -> None:
        """Count `n` more as done."""
        with self._lock:
            self.done += n
        self._changed(self)

    def update(self, done: int, total: int | None = None) -> None:
        """Set what is done and, where given, the total."""
        with self._lock:
            self.done = done
            if total is not None:
                self.total = total
        self._changed(self)


class Reporter(Protocol):
    """Shows phases."""

    def begin(self, phase: Phase) -> None:
        """A phase starts."""

    def changed(self, phase: Phase) -> None:
        """A phase has moved."""

    def end(self, phase: Phase, outcome: str) -> None:
        """A phase is over: `done`, `failed` or `stopped`."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class LiveReporter:
    """A bar for each open phase under everything else that is printed; gone when its phase is over."""

    def __init__(self, console: RichConsole, *, redirect_stdout: bool) -> None:
        """Show on the console. `redirect_stdout` says whether stdout goes to the same terminal."""
        self._lock = threading.RLock()
        self._tasks: dict[Phase, TaskID] = {}
        self._progress = Progress(
            SpinnerColumn("line"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            _Counts(),
            _Times(),
            console=console,
            transient=True,
            refresh_per_second=REFRESHES_PER_S,
            redirect_stdout=redirect_stdout,
        )
        atexit.register(self.close)  # a phase may still be open on another thread when the interpreter ends

    def begin(self, phase: Phase) -> None:
        """Add a bar."""
        with self._lock:
            self._tasks[phase] = self._progress.add_task(phase.title, total=phase.total, at_once=phase.at_once)
            self._progress.start()
            self._progress.refresh()

    def changed(self, phase: Phase) -> None:
        """Move the bar."""
        with self._lock:
            if phase in self._tasks:
                self._progress.update(self._tasks[phase], completed=phase.done, total=phase.total)

    def end(self, phase: Phase, outcome: str) -> None:
        """Take the bar away, and the live display with the last one."""
        with self._lock:
            if phase in self._tasks:
                self._progress.remove_task(self._tasks.pop(phase))
            if self._tasks:
                self._progress.refresh()  # or what is printed next drags the old bars along
            else:
                self._progress.stop()

    def close(self) -> None:
        """Take every bar away."""
        with self._lock:
            while self._tasks:
                self._progress.remove_task(self._tasks.popitem()[1])
            self._progress.stop()
        atexit.unregister(self.close)


class PlainReporter:
    """Lines at most every 10 seconds, for logs.

    The first phase of each name says that it starts, whatever the clock, so that a log always shows what hangs; after
    that a phase says something when nothing was said for 10 seconds. A phase that said something also says its end.
    """

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """Print with `write`, one line a call."""
        self._write = write
        self._clock = clock
        self._lock = threading.Lock()
        self._started: dict[Phase, float] = {}
        self._spoken: set[Phase] = set()
        self._known_names: set[str] = set()
        self._last_line = -float("inf")

    def begin(self, phase: Phase) -> None:
        """Say that the phase starts, if it is the first of its name or time for a line."""
        with self._lock:
            self._started[phase] = self._clock()
            name = re.sub(r"\d+", "#", phase.name)
            if name not in self._known_names or self._due():
                self._known_names.add(name)
                self._say(phase, "started" if phase.total is None else f"started, {phase.total} to do")

    def changed(self, phase: Phase) -> None:
        """Say how far the phase is, if it is time for a line."""
        with self._lock:
            if phase in self._started and self._due():
                elapsed = self._clock() - self._started[phase]
                left = _time_left(phase.done, phase.total, elapsed, phase.at_once)
                about = f", about {clock_text(left)} left" if left is not None else ""
                self._say(phase, f"{_count(phase.done, phase.total)} after {clock_text(elapsed)}{about}")

    def end(self, phase: Phase, outcome: str) -> None:
        """Say how the phase ended, if it said something before."""
        with self._lock:
            started = self._started.pop(phase, None)
            if started is not None and phase in self._spoken:
                counted = f", {_count(phase.done, phase.total)}" if phase.done or phase.total is not None else ""
                self._say(phase, f"{outcome}{counted} in {clock_text(self._clock() - started)}")
            self._spoken.discard(phase)

    def close(self) -> None:
        """Nothing to leave behind."""

    def _due(self) -> bool:
        return self._clock() - self._last_line >= PLAIN_INTERVAL_S

    def _say(self, phase: Phase, text: str) -> None:
        self._last_line = self._clock()
        self._spoken.add(phase)
        self._write(f"{phase.title}: {text}")


def clock_text(seconds: float) -> str:
    """Hours, minutes and seconds, as few as needed: `12s`, `3:05`, `1:02:03`."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{rest}s"


def _count(done: int, total: int | None) -> str:
    return str(done) if total is None else f"{done}/{total}"


def _time_left(done: int, total: int | None, elapsed: float, at_once: int) -> float | None:
    """Estimate from the mean pace so far; None while there is no pace or no end.

    Of things that run together the first ends late and the others soon after: before as many have ended as run at once
    there is no pace to speak of.
    """
    if total is None or not at_once <= done < total:
        return None
    return (total - done) * elapsed / done


class _Counts(ProgressColumn):
    """Done and total, right of the bar."""

    def render(self, task: Task) -> Text:
        known = None if task.total is None else int(task.total)
        return Text("" if known is None and not task.completed else _count(int(task.completed), known))


class _Times(ProgressColumn):
    """Time spent and, when known, time left."""

    def render(self, task: Task) -> Text:
        elapsed = task.elapsed or 0.0
        total = None if task.total is None else int(task.total)
        left = _time_left(int(task.completed), total, elapsed, task.fields["at_once"])
        about = f", about {clock_text(left)} left" if left is not None else ""
        return Text(clock_text(elapsed) + about)
