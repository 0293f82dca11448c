"""The table that grows by one line a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Column(NamedTuple):
    """One column: what stands above it, the metric in it, how the number is written, how wide it is."""

    header: str
    key: str
    format: str
    width: int
    interval_key: str | None = None
    """Metric written behind the number as `+-`."""


COLUMNS = (
    Column("reward +- 95%", "rollout/reward_mean", ".3f", 13, "rollout/reward_ci95"),
    Column("trunc", "rollout/truncated_frac", ".1%", 6),
    Column("length", "rollout/response_len_mean", ".1f", 7),
    Column("KL", "train/ppo_kl", ".1e", 8),
    Column("entropy", "train/entropy", ".3f", 7),
    Column("|dlogp|", "train/logprob_abs_diff", ".1e", 7),
    Column("grad", "train/grad_norm", ".3g", 7),
    Column("gen tok/s", "perf/rollout_tokens_per_s", ".0f", 9),
    Column("train tok/s", "perf/train_tokens_per_s", ".0f", 11),
    Column("seconds", "perf/step_time_s", ".1f", 7),
)
SFT_COLUMNS = (
    Column("loss", "train/loss", ".4f", 8),
    Column("nats/token", "train/nll", ".4f", 10),
    Column("answers", "rollout/samples", ".0f", 7),
    Column("tokens", "rollout/tokens", ".0f", 8),
    Column("entropy", "train/entropy", ".3f", 7),
    Column("grad", "train/grad_norm", ".3g", 7),
    Column("lr", "train/lr", ".1e", 7),
    Column("train tok/s", "perf/train_tokens_per_s", ".0f", 11),
    Column("seconds", "perf/step_time_s", ".1f", 7),
)
"""Those of supervised fine-tuning, where nothing is sampled."""

HEADER_EVERY = 20
MISSING = "-"


class StepTable:
    """Turns the metrics of steps into aligned lines, with the header again every 20 lines."""

    def __init__(self, columns: Sequence[Column] | None = None) -> None:
        """Take the columns that follow the step; by default what the first step's metrics call for."""
        self._columns = None if columns is None else tuple(columns)
        self._num_lines = 0
        self._step_width = 0

    def lines(self, step: int, total: int | None, metrics: Mapping[str, float]) -> list[str]:
        """The line of a step, after a header where one is due. A metric that is missing shows as `-`."""
        if self._columns is None:
            self._columns = SFT_COLUMNS if "rollout/conversations" in metrics else COLUMNS
        label = str(step) if total is None else f"{step}/{total}"
        width = max(self._step_width, len("step"), len(label), 2 * len(str(total)) + 1 if total is not None else 0)
        header_due = self._num_lines % HEADER_EVERY == 0 or width != self._step_width
        self._num_lines = 1 if header_due else self._num_lines + 1
        self._step_width = width
        cells = [label.rjust(width)] + [_cell(column, metrics) for column in self._columns]
        header = ["step".rjust(width)] + [column.header.rjust(column.width) for column in self._columns]
        return ["  ".join(header)] * header_due + ["  ".join(cells)]


def _cell(column: Column, metrics: Mapping[str, float]) -> str:
    value = metrics.get(column.key)
    if value is None:
        return MISSING.rjust(column.width)
    half = metrics.get(column.interval_key) if column.interval_key else None
    text = format(value, column.format)
    if half is not None:
        text = f"{text} +-{format(half, column.format)}"
    if len(text) > column.width:
        text = _short(value, column.width)
    return text.rjust(column.width)


def _short(value: float, width: int) -> str:
    """The number with as many digits as fit; `#` all over when not even one does."""
    texts = (f"{value:.{digits}g}" for digits in range(6, 0, -1))
    return next((text for text in texts if len(text) <= width), "#" * width)
