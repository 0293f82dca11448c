"""Spans of time."""

import json
import threading
from pathlib import Path

import pytest

from limes.run import SpanLog


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_span_is_written_when_it_ends(tmp_path: Path):
    with SpanLog(tmp_path / "spans.jsonl") as spans:
        with spans.span("outer", name="mine", rollout_id=3) as outer:
            with spans.span("inner") as inner:
                inner.attributes["tokens"] = 8
            assert [line["name"] for line in lines(tmp_path / "spans.jsonl")] == ["inner"]
        assert outer.seconds >= inner.seconds > 0
    inner_line, outer_line = lines(tmp_path / "spans.jsonl")
    assert inner_line["tokens"] == 8
    assert outer_line["rollout_id"] == 3
    assert outer_line["name"] == "outer"
    assert outer_line["thread"] == threading.current_thread().name
    assert outer_line["end"] - outer_line["start"] == pytest.approx(outer.seconds, abs=1e-5)


def test_a_span_left_by_an_error_says_so(tmp_path: Path):
    with SpanLog(tmp_path / "spans.jsonl") as spans, pytest.raises(KeyboardInterrupt), spans.span("x"):
        raise KeyboardInterrupt
    assert lines(tmp_path / "spans.jsonl")[0]["error"] == "KeyboardInterrupt"


def test_threads_write_whole_lines(tmp_path: Path):
    spans = SpanLog(tmp_path / "spans.jsonl")

    def work() -> None:
        for i in range(100):
            with spans.span("work", i=i, text="x" * 200):
                pass

    threads = [threading.Thread(target=work, name=f"role-{n}") for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans.close()
    written = lines(tmp_path / "spans.jsonl")
    for thread in threads:
        assert [line["i"] for line in written if line["thread"] == thread.name] == list(range(100))


def test_a_span_that_ends_after_close_is_counted(tmp_path: Path):
    spans = SpanLog(tmp_path / "spans.jsonl")
    with spans.span("late"):
        spans.close()
        spans.close()
    assert spans.num_late == 1
    assert lines(tmp_path / "spans.jsonl") == []


def test_without_a_file_spans_are_still_timed():
    with SpanLog(None) as spans, spans.span("x") as span:
        pass
    assert span.seconds > 0
