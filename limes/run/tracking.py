"""All that a run reports to, and what it reports when."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from limes.config import Config, to_toml
from limes.config.counting import num_of
from limes.records import Sample
from limes.run.console import Console
from limes.run.curve import draw_reward_curve
from limes.run.folder import RunFolder
from limes.run.metric_log import MetricLog
from limes.run.spans import SpanLog
from limes.run.trackers import open_trackers


class Tracking:
    """A run's folder, metrics, spans and console.

    Metrics of rollout r have step r; an evaluation has the step of the rollout that is sampled with the same weights.

    Attributes:
        num_rollout: rollouts of the run, once it is known; None or 0 where nothing is trained.
    """

    def __init__(self, folder: RunFolder, console: Console, log: MetricLog, spans: SpanLog) -> None:
        self.folder = folder
        self.console = console
        self.num_rollout: int | None = None
        self._log = log
        self._spans = spans
        self._step_metrics: dict[str, float] = {}
        self._step_started = time.perf_counter()

    @contextmanager
    def span(self, name: str, **attributes: Any) -> Iterator[None]:
        """Time the block."""
        with self._spans.span(name, **attributes):
            yield

    def step_begins(self, rollout_id: int) -> None:
        """Rollout `rollout_id` is about to be generated."""
        self._step_metrics = {}
        self._step_started = time.perf_counter()

    def record(self, step: int, metrics: Mapping[str, float], remarks: Sequence[str] = ()) -> None:
        """Take metrics of a step, and remarks that a person should see."""
        self._log.log(metrics, step)
        self._step_metrics.update(metrics)
        for remark in [*remarks, *without_signal(metrics, self._step_metrics), *without_number(metrics)]:
            self.console.warn(f"rollout {step}: {remark}")

    def step_ends(self, rollout_id: int) -> None:
        """Generated, trained, and the engines have the new weights: print the step's line."""
        seconds = {"perf/step_time_s": time.perf_counter() - self._step_started}
        self._log.log(seconds, rollout_id)
        self.console.step_line(rollout_id, self.num_rollout, self._step_metrics | seconds)

    def evaluated(self, step: int, metrics: Mapping[str, float], remarks: Sequence[str] = ()) -> None:
        """Take an evaluation of the weights that rollout `step` is sampled with."""
        self._log.log(metrics, step)
        name = f"evaluation before rollout {step}" if self.num_rollout else "evaluation"
        self.console.notice(f"{name}: {describe_evaluation(metrics)}")
        for remark in remarks:
            self.console.warn(f"{name}: {remark}")

    def show(self, title: str, samples: Sequence[Sample]) -> None:
        """Show sampled answers."""
        if samples:
            self.console.show_samples(title, samples)

    def finish(self, outcome: str) -> None:
        """Write everything out, draw the reward curve, and say in one line how the run ended and where it is.

        A run that wrote nothing but its settings leaves no folder, so that its name can be used again.

        Args:
            outcome: `done`, `interrupted`, `failed: why`, or `refused` when an error message follows.
        """
        self._spans.close()
        self._log.close()
        picture = draw_reward_curve(self.folder.metrics, self.folder.reward_curve) if outcome == "done" else None
        self.console.close()
        if outcome != "done" and self._is_empty():
            shutil.rmtree(self.folder.path)
            if outcome != "refused":
                self.console.notice(f"{outcome} before anything was generated")
            return
        drawn = f", reward curve: {picture}" if picture is not None else ""
        self.console.notice(f"{outcome}; run folder: {self.folder.path}{drawn}")

    def _is_empty(self) -> bool:
        folder = self.folder
        written = [*folder.rollouts.iterdir(), *folder.checkpoints.iterdir()]
        return not written and folder.metrics.stat().st_size == 0


def init_tracking(config: Config, default_name: str, console: Console) -> Tracking:
    """Make the run's folder, write the settings into it and open the trackers.

    Raises:
        ValueError: the folder exists already or cannot be made, or a tracker cannot be opened.
    """
    folder = RunFolder.create(config.run, default_name)
    folder.write_config(to_toml(config))
    sinks = open_trackers(config.run, folder, config.model_dump(mode="json"), console.notice)
    return Tracking(folder, console, MetricLog(folder.metrics, sinks, console.warn), SpanLog(folder.spans))


def without_signal(metrics: Mapping[str, float], step_metrics: Mapping[str, float]) -> list[str]:
    """A sentence if these metrics are those of a training that moved nothing although there were rewards.

    Only training knows: equal rewards are no signal for some estimators alone, and a teacher, a KL or an entropy bonus
    moves the policy without any.

    Args:
        step_metrics: all that is known of the step.
    """
    if not metrics.get("train/skipped") or step_metrics.get("rollout/trained_samples") == 0:
        return []
    equal = step_metrics.get("rollout/zero_std_frac") == 1
    why = "in every group all rewards are equal" if equal else "no trained token has an advantage"
    return [f"no signal: {why}, so this step moves nothing"]


def without_number(metrics: Mapping[str, float]) -> list[str]:
    """A sentence if steps were left out because their gradient is not finite, with where that begins."""
    num = metrics.get("train/nonfinite_grads")
    if not num:
        return []
    why = ""
    if advantages := metrics.get("train/nonfinite_advantages"):
        why = f": {advantages:.2%} of the advantages (algorithm.advantage_estimator) are not finite"
    elif losses := metrics.get("train/nonfinite_losses"):
        why = f": {losses:.2%} of the token losses (algorithm.policy_loss, or the model itself) are not finite"
    elif not math.isfinite(metrics.get("train/loss", 0.0)):
        why = ": the losses of all tokens are finite, and what algorithm.aggregation makes of them is not"
    return [f"{num_of(int(num), 'gradient')} not finite, so {num_of(int(num), 'optimizer step')} moved nothing{why}"]


def describe_evaluation(metrics: Mapping[str, float]) -> str:
    """Reward and pass@k with their intervals, or the loss on given answers, in one line."""
    parts = [f"loss {metrics['eval/nll']:.4f} nats a token"] if "eval/nll" in metrics else []
    reward, half = metrics.get("eval/reward_mean"), metrics.get("eval/reward_ci95")
    if reward is not None:
        parts.append(f"reward {reward:.3f}" + ("" if half is None else f" +- {half:.3f}"))
    for key, value in metrics.items():
        k = key.removeprefix("eval/pass_at_")
        if k != key and k.isdecimal():
            low, high = metrics[f"{key}_low"], metrics[f"{key}_high"]
            parts.append(f"pass@{k} {value:.3f} [{low:.3f}, {high:.3f}]")
    return ", ".join(parts) or "no answer has a reward"
