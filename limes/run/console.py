"""What a run says to the person in front of it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console as RichConsole
from rich.text import Text

from limes.records import Sample
from limes.run.answers import answer_lines
from limes.run.progress import LiveReporter, Phase, PlainReporter, Reporter
from limes.run.table import Column, StepTable


class Console:
    """Progress, notices and warnings on stderr; step lines and sampled answers on stdout. Safe to use from any thread.

    On a terminal, phases show a live bar; elsewhere they print a line at most every 10 seconds. Close it, or use it as
    a context manager, to be sure that the terminal is left as it was.
    """

    def __init__(
        self,
        *,
        columns: Sequence[Column] | None = None,
        out: TextIO | None = None,
        err: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Print on `out` and `err`; default: stdout and stderr."""
        out, err = out or sys.stdout, err or sys.stderr
        live = _is_terminal(err)
        self._err = _rich(err, live)
        # with both on a terminal, one console keeps the bars below what is printed
        self._out = self._err if live and _is_terminal(out) else _rich(out, _is_terminal(out))
        self._table = StepTable(columns)
        self._lock = threading.Lock()
        self._reporter: Reporter
        if live:
            self._reporter = LiveReporter(self._err, redirect_stdout=self._out is self._err)
        else:
            self._reporter = PlainReporter(self.notice, clock)

    @contextmanager
    def phase(self, name: str, total: int | None = None, *, detail: str = "", at_once: int = 1) -> Iterator[Phase]:
        """Show the block as a phase; phases may nest and may be open on several threads.

        Args:
            name: what is done, the same each time (`generate`).
            total: how many things there are to do, where known.
            detail: what differs from time to time (`rollout 3`).
            at_once: how many of them are worked on at the same time; the time left is told once that many are done.
        """
        phase = Phase(name, total, detail, self._reporter.changed, at_once)
        outcome = "done"
        try:
            self._reporter.begin(phase)
            yield phase
        except BaseException as error:
            outcome = "failed" if isinstance(error, Exception) else "stopped"
            raise
        finally:
            self._reporter.end(phase, outcome)

    def notice(self, text: str) -> None:
        """Tell something that is worth knowing."""
        _print(self._err, text)

    def warn(self, text: str) -> None:
        """Tell something that may be wrong."""
        _print(self._err, f"warning: {text}", style="yellow")

    def step_line(self, step: int, total: int | None, metrics: Mapping[str, float]) -> None:
        """Print the line of a step, written `step/total`; what the metrics lack shows as `-`."""
        with self._lock:
            *header, line = self._table.lines(step, total, metrics)
            for text in header:
                _print(self._out, text, style="bold")
            _print(self._out, line)

    def show_samples(self, title: str, samples: Sequence[Sample]) -> None:
        """Print question, answer and reward of the samples."""
        _print(self._out, "\n".join(answer_lines(title, samples)))

    def close(self) -> None:
        """Take down the live display. Closing again does nothing."""
        self._reporter.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def _rich(stream: TextIO, terminal: bool) -> RichConsole:
    return RichConsole(file=stream, force_terminal=terminal, highlight=False, markup=False, emoji=False)


def _print(console: RichConsole, text: str, style: str = "") -> None:
    """Print as it is: no markup, no wrapping, at once, and escaped where the stream cannot write a character."""
    text = text.encode(console.encoding, "backslashreplace").decode(console.encoding)
    console.print(Text(text, style=style), soft_wrap=True)
    console.file.flush()
