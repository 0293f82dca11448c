"""The metrics file and its sinks."""

import json
import math
import threading
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limes.run import MetricLog, SpanLog, read_metrics
from limes.run.progress import Phase, PlainReporter
from limes.run.table import StepTable


class FakeSink:
    """Remembers what it got; refuses steps that go backwards in a family, and everything while `broken`."""

    name = "fake"

    def __init__(self):
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.last: dict[str, int] = {}
        self.broken = False
        self.num_closed = 0

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self.broken:
            raise ConnectionError("server away")
        for key in metrics:
            family = key.split("/")[0]
            assert step >= self.last.get(family, 0)
            self.last[family] = step
        self.rows.append((step, dict(metrics)))

    def close(self) -> None:
        self.num_closed += 1
        if self.broken:
            raise ConnectionError("server away")


def test_lines_are_there_at_once_and_sinks_get_the_same(tmp_path: Path):
    sink = FakeSink()
    with MetricLog(tmp_path / "m.jsonl", [sink]) as log:
        log.log({"train/loss": 0.1, "train/lr": 1}, 3)
        (line,) = read_metrics(tmp_path / "m.jsonl")
    assert line.pop("time") > 0
    assert line == {"step": 3, "train/loss": 0.1, "train/lr": 1.0}
    assert sink.rows == [(3, {"train/loss": 0.1, "train/lr": 1.0})]
    assert sink.num_closed == 1


def test_steps_never_go_backwards_within_a_family(tmp_path: Path):
    sink = FakeSink()
    with MetricLog(tmp_path / "m.jsonl", [sink]) as log:
        log.log({"train/loss": 1}, 24)
        log.log({"eval/reward_mean": 1}, 3)
        log.log({"train/loss": 1}, 26)
        log.log({"train/lr": 1}, 26)
        with pytest.raises(ValueError, match="train metrics of step 25 came after those of step 26"):
            log.log({"eval/reward_mean": 1, "train/loss": 1}, 25)
        log.log({"eval/reward_mean": 1}, 4)
    assert [line["step"] for line in read_metrics(tmp_path / "m.jsonl")] == [24, 3, 26, 26, 4]
    assert len(sink.rows) == 5


def test_many_writers_lose_nothing(tmp_path: Path):
    sink = FakeSink()
    with MetricLog(tmp_path / "m.jsonl", [sink]) as log:

        def write(family: str) -> None:
            for step in range(50):
                log.log({f"{family}/x": step}, step)

        threads = [threading.Thread(target=write, args=(family,)) for family in ("rollout", "train", "eval", "perf")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(list(read_metrics(tmp_path / "m.jsonl"))) == len(sink.rows) == 200
    assert log.failures == {}


def test_a_failing_sink_is_counted_told_once_and_costs_nothing_else(tmp_path: Path):
    bad, good, told = FakeSink(), FakeSink(), []
    bad.name, bad.broken = "bad", True
    with MetricLog(tmp_path / "m.jsonl", [bad, good], told.append) as log:
        for step in range(5):
            log.log({"train/loss": 1}, step)
        assert len(told) == 1
        assert "ConnectionError: server away" in told[0]
    assert log.failures["bad"].count == 6  # five steps and the close
    assert len(told) == 2
    assert "6 times" in told[1]
    assert len(good.rows) == 5
    assert good.num_closed == 1
    assert len(list(read_metrics(tmp_path / "m.jsonl"))) == 5


@given(st.floats())
def test_every_float_survives_in_strict_json(tmp_path_factory: pytest.TempPathFactory, value: float):
    path = tmp_path_factory.mktemp("m") / "m.jsonl"
    with MetricLog(path) as log:
        log.log({"train/x": value}, 0)
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (line,) = read_metrics(path)
    assert line["train/x"] == value or (math.isnan(value) and math.isnan(line["train/x"]))


def test_bad_names_and_values_write_nothing(tmp_path: Path):
    with MetricLog(tmp_path / "m.jsonl") as log:
        with pytest.raises(ValueError, match=r"'loss'.*family"):
            log.log({"train/ok": 1, "loss": 1}, 0)
        with pytest.raises(ValueError, match="'train/x': 'high' is not a number"):
            log.log({"train/x": "high"}, 0)  # type: ignore[dict-item]
    assert (tmp_path / "m.jsonl").read_text() == ""


def test_half_a_line_of_a_killed_run_does_no_harm(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0, "train/x": 1}\n{"step": 1, "tra')
    assert [line["step"] for line in read_metrics(path)] == [0]
    with MetricLog(path) as log:
        log.log({"train/x": 2}, 1)
    assert [line["train/x"] for line in read_metrics(path)] == [1.0, 2.0]
    path.write_text('{"step": 0}\nnonsense\n')
    with pytest.raises(ValueError, match=r"m\.jsonl, line 2"):
        list(read_metrics(path))


def test_thousands_of_steps_leave_nothing_in_memory(tmp_path: Path):
    log, table, spans = MetricLog(tmp_path / "m.jsonl"), StepTable(), SpanLog(tmp_path / "s.jsonl")
    reporter = PlainReporter(lambda text: None, clock=iter(range(10**9)).__next__)

    def steps(start: int, stop: int) -> int:
        for step in range(start, stop):
            log.log({"train/loss": step, "rollout/reward_mean": step}, step)
            table.lines(step, None, {"train/grad_norm": step})
            phase = Phase(f"generate {step}", 10, f"rollout {step}", reporter.changed)
            reporter.begin(phase)
            phase.advance(7)
            reporter.end(phase, "done")
            with spans.span("step", rollout_id=step):
                pass
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        early, late = steps(0, 200), steps(200, 2000)
    finally:
        tracemalloc.stop()
        log.close()
        spans.close()
    assert late - early < 20_000
