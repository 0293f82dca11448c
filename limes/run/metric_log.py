"""The metrics file of a run and the sinks that get the same numbers."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from limes.run.metrics import check_name


class Sink(Protocol):
    """Something that takes metrics."""

    name: str

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the metrics of a step. Steps never go backwards within a family."""

    def close(self) -> None:
        """Write what is held back and let go of everything."""


@dataclass(slots=True)
class SinkFailures:
    """How often a sink failed, and why it did so first."""

    count: int
    first_cause: str


class MetricLog:
    """Appends metrics to a JSON lines file and hands them to the sinks. Safe to call from several threads.

    A line is `{"step": int, "time": seconds since 1970, "family/name": number, ...}` and is on its way to the disk
    when `log` returns. JSON has no NaN and no infinity: they are written as the strings "nan", "inf" and "-inf", and
    `read_metrics` turns them back. A sink that fails is counted in `failures`, warned about once, and does not end the
    run.
    """

    def __init__(self, path: Path, sinks: Sequence[Sink] = (), warn: Callable[[str], None] | None = None) -> None:
        """Open the file for appending. `warn` gets a line for people when a sink first fails; default: logging."""
        self.failures: dict[str, SinkFailures] = {}
        self._sinks = tuple(sinks)
        self._warn = warn or logging.getLogger(__name__).warning
        self._last_steps: dict[str, int] = {}
        self._lock = threading.Lock()
        _drop_half_line(path)
        self._file = path.open("a", encoding="utf-8", newline="\n")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the metrics of a step.

        Raises:
            ValueError: a name has no known family, a value is no number, or a family's step goes backwards.
        """
        values = {key: _number(key, value) for key, value in metrics.items()}
        families = {check_name(key) for key in values}
        with self._lock:
            for family in sorted(families):
                last = self._last_steps.get(family, 0)
                if step < last:
                    raise ValueError(f"{family} metrics of step {step} came after those of step {last}")
            self._last_steps.update(dict.fromkeys(families, step))
            line = {"step": step, "time": round(time.time(), 3), **{k: _writable(v) for k, v in values.items()}}
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
            for sink in self._sinks:
                self._guard(sink, lambda sink=sink: sink.log(values, step))  # type: ignore[misc]

    def close(self) -> None:
        """Close the file and every sink. Closing again does nothing."""
        with self._lock:
            if self._file.closed:
                return
            self._file.close()
            for sink in self._sinks:
                self._guard(sink, sink.close)
            for name, failures in self.failures.items():
                if failures.count > 1:
                    self._warn(f"tracker {name} failed {failures.count} times; first: {failures.first_cause}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _guard(self, sink: Sink, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a tracker may raise anything, and its failure must not end the run
            failures = self.failures.setdefault(sink.name, SinkFailures(0, f"{type(error).__name__}: {error}"))
            failures.count += 1
            if failures.count == 1:
                self._warn(
                    f"tracker {sink.name} failed ({failures.first_cause}); metrics.jsonl has everything, going on"
                )


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics file: `step` an int, `time` and every metric a float.

    A last line without its end, as a killed run leaves it, is left out.

    Raises:
        ValueError: another line is broken.
    """
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            if not text.endswith("\n"):
                return
            try:
                line = json.loads(text)
                yield {key: value if key == "step" else float(value) for key, value in line.items()}
            except (ValueError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}: not a line of metrics ({error})") from error


def _number(key: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"metric {key!r}: {value!r} is not a number") from None


def _writable(value: float) -> float | str:
    return value if math.isfinite(value) else repr(value)


def _drop_half_line(path: Path) -> None:
    """Cut off a last line without its end, so that the next line does not grow on it."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        whole = file.read().rpartition(b"\n")
        file.truncate(len(whole[0]) + len(whole[1]))
