"""The run folder, its metrics and samples, and what a run says to people."""

from limes.run.console import Console
from limes.run.curve import draw_reward_curve
from limes.run.folder import RunFolder
from limes.run.metric_log import MetricLog, Sink, read_metrics
from limes.run.metrics import METRICS, Last, Max, Mean, MetricValue, Min, Sum, combine, reduce
from limes.run.samples import (
    TrainRecord,
    read_samples,
    read_train_records,
    write_samples,
    write_train_records,
)
from limes.run.spans import Span, SpanLog
from limes.run.trackers import open_trackers

__all__ = [
    "METRICS",
    "Console",
    "Last",
    "Max",
    "Mean",
    "MetricLog",
    "MetricValue",
    "Min",
    "RunFolder",
    "Sink",
    "Span",
    "SpanLog",
    "Sum",
    "TrainRecord",
    "combine",
    "draw_reward_curve",
    "open_trackers",
    "read_metrics",
    "read_samples",
    "read_train_records",
    "reduce",
    "write_samples",
    "write_train_records",
]
