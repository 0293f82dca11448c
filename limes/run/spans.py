"""Where the time of a run went."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from limes.run.files import to_json


@dataclass(slots=True)
class Span:
    """A named stretch of time. `attributes` may grow until the span ends; `seconds` is 0 until then."""

    name: str
    start: float
    attributes: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class SpanLog:
    """Appends every finished span to a JSON lines file. Safe to use from several threads and from coroutines.

    A line is `{"name", "start", "end", "thread", ...attributes}`, times in seconds since 1970 and durations from the
    monotonic clock; a span left by an exception also has `error`, the exception's class.
    """

    def __init__(self, path: Path | None) -> None:
        """Open the file for appending; with None spans are timed and not written."""
        self.num_late = 0
        """Spans that ended after `close` and were not written."""
        self._lock = threading.Lock()
        self._file = path.open("a", encoding="utf-8", newline="\n", buffering=1) if path is not None else None

    @contextmanager
    def span(self, name: str, /, **attributes: Any) -> Iterator[Span]:
        """Time the block and write it down. Use `span.seconds` after the block."""
        span = Span(name, time.time(), attributes)
        begin = time.perf_counter()
        try:
            yield span
        except BaseException as error:
            span.attributes["error"] = type(error).__name__
            raise
        finally:
            span.seconds = time.perf_counter() - begin
            self._write(span)

    def close(self) -> None:
        """Close the file. Closing again does nothing."""
        with self._lock:
            if self._file is not None:
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, span: Span) -> None:
        if self._file is None:
            return
        own = {"name": span.name, "start": span.start, "end": span.start + span.seconds}
        line = to_json({**span.attributes, **own, "thread": threading.current_thread().name}) + "\n"
        with self._lock:
            if self._file.closed:
                self.num_late += 1
            else:
                self._file.write(line)
