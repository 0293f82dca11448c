"""The reward curve of a run as a picture."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from limes.run.metric_log import read_metrics

TRAIN_COLOR, EVAL_COLORS, GRID_COLOR, TEXT_COLOR = (
    "#2563ab",
    ("#c2410c", "#15803d", "#7e22ce", "#a16207"),
    "#dddddd",
    "#333333",
)


@dataclass(slots=True)
class Curve:
    """Points of one line: step, mean, half width of the 95% interval (0 where unknown)."""

    steps: list[int] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    half_widths: list[float] = field(default_factory=list)


def draw_reward_curve(metrics_path: Path, png_path: Path) -> Path | None:
    """Draw mean reward with its 95% interval against the rollout, and evaluations as points.

    Returns the picture, or None when the metrics hold no reward at all.
    """
    curves = _read_curves(metrics_path)
    if not curves:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    eval_colors = iter(EVAL_COLORS * len(curves))
    for name, curve in curves.items():
        if name == "rollout":
            _draw_rollouts(axes, curve)
        else:
            _draw_evals(axes, curve, name, next(eval_colors))
    _dress(axes, curves)
    temporary = png_path.with_name(png_path.name + ".tmp")
    canvas.print_png(str(temporary))
    temporary.replace(png_path)
    return png_path


def _read_curves(metrics_path: Path) -> dict[str, Curve]:
    """Every `<name>/reward_mean` of the file by name, the rollouts first; a mean that is not finite leaves a gap."""
    curves: dict[str, Curve] = {}
    for line in read_metrics(metrics_path):
        for key, mean in line.items():
            name, _, metric = key.rpartition("/")
            if metric == "reward_mean" and name.split("/")[0] in ("rollout", "eval"):
                half = line.get(f"{name}/reward_ci95", 0.0)
                curve = curves.setdefault(name, Curve())
                curve.steps.append(line["step"])
                curve.means.append(mean if math.isfinite(mean) else math.nan)
                curve.half_widths.append(half if math.isfinite(half) else 0.0)
    drawable = [item for item in curves.items() if not all(map(math.isnan, item[1].means))]
    return dict(sorted(drawable, key=lambda item: item[0] != "rollout"))


def _draw_rollouts(axes: Any, curve: Curve) -> None:
    low = [mean - half for mean, half in zip(curve.means, curve.half_widths, strict=True)]
    high = [mean + half for mean, half in zip(curve.means, curve.half_widths, strict=True)]
    marker = "o" if len(curve.steps) <= 60 else None
    axes.plot(
        curve.steps, curve.means, color=TRAIN_COLOR, linewidth=1.8, marker=marker, markersize=3.5, label="rollouts"
    )
    if len(curve.steps) == 1:
        axes.errorbar(curve.steps, curve.means, yerr=curve.half_widths, color=TRAIN_COLOR, capsize=4, linestyle="none")
    else:
        axes.fill_between(curve.steps, low, high, color=TRAIN_COLOR, alpha=0.18, linewidth=0)


def _draw_evals(axes: Any, curve: Curve, name: str, color: str) -> None:
    label = "evaluation" if name == "eval" else f"evaluation: {name.removeprefix('eval/')}"
    axes.errorbar(
        curve.steps,
        curve.means,
        yerr=curve.half_widths,
        color=color,
        marker="D",
        markersize=6,
        capsize=4,
        linestyle="none",
        label=label,
        zorder=3,
    )


def _dress(axes: Any, curves: dict[str, Curve]) -> None:
    """Labels, limits and the rest of the frame."""
    from matplotlib.ticker import MaxNLocator

    means = [mean for curve in curves.values() for mean in curve.means if not math.isnan(mean)]
    steps = [step for curve in curves.values() for step in curve.steps]
    if min(means) >= 0 and max(means) <= 1:
        axes.set_ylim(-0.05, 1.05)
    if min(steps) == max(steps):
        axes.set_xlim(min(steps) - 1, max(steps) + 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel("rollout (number)", color=TEXT_COLOR)
    axes.set_ylabel("mean reward (per answer, 95% interval)", color=TEXT_COLOR)
    axes.set_title("Reward over training", loc="left", color=TEXT_COLOR, fontweight="bold")
    axes.grid(axis="y", color=GRID_COLOR, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=TEXT_COLOR)
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2, ncols=4)
