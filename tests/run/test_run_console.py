"""What people see: phases, step lines, answers; on a terminal and in a log."""

import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limes.records import Sample, Status
from limes.run import Console
from limes.run.answers import last_user_text, shown
from limes.run.progress import clock_text
from limes.run.table import COLUMNS, Column, StepTable

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
FULL = {
    "rollout/reward_mean": 0.5123,
    "rollout/reward_ci95": 0.0812,
    "rollout/truncated_frac": 0.125,
    "rollout/response_len_mean": 12.34,
    "train/ppo_kl": 1.23e-4,
    "train/entropy": 0.61,
    "train/logprob_abs_diff": 1.3e-6,
    "train/grad_norm": 3.456,
    "perf/rollout_tokens_per_s": 151.2,
    "perf/train_tokens_per_s": 2301.0,
    "perf/step_time_s": 6.13,
}


class Clock:
    """A clock moved by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def plain(clock: Clock | None = None, **options) -> tuple[Console, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    return Console(out=out, err=err, clock=clock or Clock(), **options), out, err


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TextIO, list[str]]]:
    """A stream that is a terminal, and what was written there once the block is left."""
    monkeypatch.setenv("TERM", "xterm-256color")
    master, slave = os.openpty()
    seen: list[str] = []

    def drain() -> None:
        data = b""
        while True:
            try:
                chunk = os.read(master, 4096)
            except OSError:  # how Linux tells that the other end is closed
                break
            if not chunk:
                break
            data += chunk
        seen.append(data.decode())

    reader = threading.Thread(target=drain)
    reader.start()
    try:
        with os.fdopen(slave, "w", encoding="utf-8") as stream:
            yield stream, seen
    finally:
        reader.join()
        os.close(master)


def test_a_log_gets_a_line_at_most_every_ten_seconds():
    clock = Clock()
    console, out, err = plain(clock)
    with console.phase("generate", 100, detail="rollout 0") as phase:
        for second in range(1, 26):
            clock.now = second
            phase.advance(4)
    assert err.getvalue().splitlines() == [
        "generate rollout 0: started, 100 to do",
        "generate rollout 0: 40/100 after 10s, about 15s left",
        "generate rollout 0: 80/100 after 20s, about 5s left",
        "generate rollout 0: done, 100/100 in 25s",
    ]
    assert out.getvalue() == ""


def test_the_time_left_is_told_once_a_pace_is_known():
    """Things that run together end late and in a burst: the first of them says nothing of the rest."""
    clock = Clock()
    console, _, err = plain(clock)
    with console.phase("evaluate", 256, at_once=128) as phase:
        for now, done in ((40, 1), (60, 127), (80, 128), (120, 255), (140, 256)):
            clock.now = now
            phase.update(done)
    assert err.getvalue().splitlines()[1:] == [
        "evaluate: 1/256 after 40s",
        "evaluate: 127/256 after 1:00",
        "evaluate: 128/256 after 1:20, about 1:20 left",
        "evaluate: 255/256 after 2:00, about 0s left",
        "evaluate: 256/256 after 2:20",
        "evaluate: done, 256/256 in 2:20",
    ]


def test_a_bar_tells_the_time_left_by_the_same_rule(monkeypatch: pytest.MonkeyPatch):
    with terminal(monkeypatch) as (stream, seen), Console(out=stream, err=stream) as console:
        for name, at_once in (("early", 8), ("known", 2)):
            with console.phase(name, 9, at_once=at_once) as phase:
                phase.update(3)
                with console.phase("inner"):  # draws all bars again
                    pass
    (text,) = seen
    early, known = text.split("known", 1)
    assert "3/9" in early
    assert "3/9" in known
    assert "left" not in early
    assert "left" in known


def test_short_phases_that_come_again_are_silent_but_the_first_of_a_name_is_not():
    clock = Clock()
    console, _, err = plain(clock)
    for rollout in range(9):
        for name in ("generate", f"train {rollout}"):
            with console.phase(name):
                clock.now += 1
    assert err.getvalue().splitlines() == [
        "generate: started",
        "generate: done in 1s",
        "train 0: started",
        "train 0: done in 1s",
        "generate: started",
        "generate: done in 1s",
    ]


@pytest.mark.parametrize(("error", "word"), [(RuntimeError, "failed"), (KeyboardInterrupt, "stopped")])
def test_a_log_tells_how_a_phase_ended(error: type[BaseException], word: str):
    console, _, err = plain()
    with pytest.raises(error), console.phase("save"):
        raise error
    assert err.getvalue().splitlines() == ["save: started", f"save: {word} in 0s"]


def test_update_sets_and_a_finished_phase_no_longer_speaks():
    clock = Clock()
    console, _, err = plain(clock)
    with console.phase("download") as phase:
        clock.now = 30
        phase.update(3, 12)
    clock.now = 100
    phase.advance()
    assert err.getvalue().splitlines()[1:] == [
        "download: 3/12 after 30s, about 1:30 left",
        "download: done, 3/12 in 30s",
    ]


def test_threads_count_together():
    console, _, err = plain()
    with console.phase("grade", 4000) as phase:
        threads = [threading.Thread(target=lambda: [phase.advance() for _ in range(1000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert phase.done == 4000
    assert "done, 4000/4000" in err.getvalue()


def test_a_terminal_gets_bars_and_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch):
    with terminal(monkeypatch) as (stream, seen), Console(out=stream, err=stream) as console:
        with console.phase("training", 64) as outer:
            outer.update(31)
            outer.advance()
            with console.phase("generate"):
                console.step_line(1, 3, FULL)
        with console.phase("save"):
            console.notice("between [red]bars[/red]")
    (text,) = seen
    assert text.count(HIDE) == text.count(SHOW) == 2
    assert text.rindex(SHOW) > text.rindex(HIDE)
    for part in ("training", "generate", "32/64", "save", "between [red]bars[/red]", "0.512 +-0.081"):
        assert part in text
    assert text.rindex("0.512 +-0.081") < text.rindex(SHOW)


def test_an_interrupt_leaves_the_terminal_usable(monkeypatch: pytest.MonkeyPatch):
    with terminal(monkeypatch) as (stream, seen):
        console = Console(out=stream, err=stream)
        with pytest.raises(KeyboardInterrupt), console.phase("training", 3), console.phase("generate"):
            raise KeyboardInterrupt
        console.notice("stopped")
    (text,) = seen
    assert text.count(HIDE) == text.count(SHOW) == 1
    assert text.rindex("generate") < text.rindex(SHOW) < text.rindex("stopped")


def test_close_takes_down_a_phase_that_another_thread_holds_open(monkeypatch: pytest.MonkeyPatch):
    opened, closed = threading.Event(), threading.Event()
    with terminal(monkeypatch) as (stream, seen):
        console = Console(out=stream, err=stream)

        def hold() -> None:
            with console.phase("generate", 8) as phase:
                opened.set()
                closed.wait()
                phase.advance()

        thread = threading.Thread(target=hold)
        thread.start()
        opened.wait()
        console.close()
        console.close()
        closed.set()
        thread.join()
    (text,) = seen
    assert text.count(HIDE) == text.count(SHOW) == 1


def test_bars_do_not_reach_a_piped_stdout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    out = io.StringIO()
    with terminal(monkeypatch) as (stream, _), Console(out=out, err=stream) as console, console.phase("generate", 4):
        console.step_line(0, None, FULL)
        print("stays on stdout")
    assert capsys.readouterr().out == "stays on stdout\n"
    header, line = out.getvalue().splitlines()
    assert header.startswith("step  reward +- 95%")
    assert line.startswith("   0  0.512 +-0.081")


@pytest.mark.parametrize("name", ["dumb", "unknown"])
def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch, name: str):
    with terminal(monkeypatch) as (stream, seen):
        monkeypatch.setenv("TERM", name)
        with Console(out=stream, err=stream) as console, console.phase("generate"):
            pass
    assert seen == ["generate: started\r\ngenerate: done in 0s\r\n"]


def test_step_line():
    console, out, _ = plain()
    console.step_line(7, 200, FULL)
    assert out.getvalue().splitlines() == [
        "   step  reward +- 95%   trunc   length        KL  entropy  |dlogp|     grad  gen tok/s  train tok/s  seconds",
        "  7/200  0.512 +-0.081   12.5%     12.3   1.2e-04    0.610  1.3e-06     3.46        151         2301      6.1",
    ]


def test_missing_values_show_as_a_dash_and_the_header_comes_again():
    console, out, _ = plain()
    for step in range(41):
        console.step_line(step, 41, {})
    lines = out.getvalue().splitlines()
    assert [number for number, line in enumerate(lines) if "reward" in line] == [0, 21, 42]
    assert lines[1].split() == ["0/41"] + ["-"] * len(COLUMNS)


@given(
    st.dictionaries(st.sampled_from(sorted(FULL)), st.floats(), max_size=11),
    st.integers(0, 10**6),
    st.none() | st.just(10**6),
)
def test_every_line_is_aligned_and_fits(metrics: dict[str, float], step: int, total: int | None):
    table = StepTable()
    for values in (FULL, metrics):
        header, *lines = table.lines(0 if values is FULL else step, total, values)[-2:]
        for line in [header, *lines]:
            assert len(line) <= 120
            assert len({len(text) for text in [header, *lines]}) == 1


def test_numbers_that_do_not_fit():
    table = StepTable([Column("a", "train/a", ".3f", 6)])
    assert [table.lines(0, None, {"train/a": value})[-1].split()[1] for value in (-123456.0, 1e-300, -1e100)] == [
        "-1e+05",
        "0.000",
        "######",
    ]


def test_other_columns():
    console, out, _ = plain(columns=[Column("KL to ref", "train/ref_kl", ".2f", 9)])
    console.step_line(0, None, {"train/ref_kl": 0.256})
    assert out.getvalue().splitlines() == ["step  KL to ref", "   0       0.26"]


def test_answers():
    console, out, _ = plain()
    messages = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "?"},
        {"role": "user", "content": "1 + 2?"},
    ]
    right = Sample(
        0, 0, prompt=messages, response="It is\n3 [/red]\x1b[2J", reward=1.0, label="3", status=Status.COMPLETED
    )
    lost = Sample(1, 0, prompt="plain", reward=None, status=Status.FAILED, error="engine away")
    mixed = Sample(2, 0, prompt="x" * 9999, response="y", reward={"form": 1, "all": None}, status=Status.COMPLETED)
    console.show_samples("before training", [right, lost, mixed])
    lines = out.getvalue().splitlines()
    assert lines[:7] == [
        "before training:",
        "  1. asked     1 + 2?",
        "     answered  It is\\n3 [/red]\\x1b[2J",
        "     reward    1  (0 tokens, expected 3)",
        "  2. asked     plain",
        "     answered  (nothing)",
        "     reward    none  (0 tokens, failed, error: engine away)",
    ]
    assert len(lines[7]) < 300
    assert lines[9] == "     reward    form 1, all none  (0 tokens)"


@given(st.text())
def test_shown_text_has_no_orders_for_the_terminal(text: str):
    assert shown(text).isprintable() or all(c.isprintable() or c.isspace() for c in shown(text))
    assert not set(shown(text)) & {"\x1b", "\n", "\r", "\x08", "\x9b"}


@pytest.mark.parametrize("prompt", [[], [{"role": "user"}], [{"role": "user", "content": None}], ""])
def test_prompts_without_text(prompt: str | list):
    assert last_user_text(prompt) == ""


def test_text_in_parts():
    parts = [{"type": "text", "text": "look at"}, {"type": "text", "text": "this"}]
    assert last_user_text([{"role": "user", "content": parts}]) == "look at this"


def test_a_stream_that_cannot_write_a_character_gets_an_escape():
    raw = io.BytesIO()
    console = Console(out=io.StringIO(), err=io.TextIOWrapper(raw, encoding="ascii"))
    console.warn("r\u00e9sum\u00e9")
    assert raw.getvalue() == b"warning: r\\xe9sum\\xe9\n"


def test_clock_text():
    assert [clock_text(s) for s in (0.4, 59, 59.6, 185, 3723)] == ["0s", "59s", "1:00", "3:05", "1:02:03"]
