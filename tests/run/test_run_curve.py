"""The picture of the reward."""

from pathlib import Path

import pytest
from matplotlib.image import imread

from limes.run import MetricLog, draw_reward_curve
from limes.run.curve import _read_curves

LINES = {
    "one": [{"rollout/reward_mean": -3.0, "rollout/reward_ci95": 0.5}],
    "no interval": [{"rollout/reward_mean": 0.1}, {"rollout/reward_mean": 0.2}],
    "gap": [{"rollout/reward_mean": 0.1}, {"rollout/reward_mean": float("nan")}, {"rollout/reward_mean": 0.2}],
    "evaluations only": [{"eval/reward_mean": 0.1, "eval/reward_ci95": 0.1}, {"eval/other/reward_mean": 0.2}],
    "many": [{"rollout/reward_mean": i / 100, "rollout/reward_ci95": 0.1, "eval/reward_mean": 0.3} for i in range(100)],
}


def written(tmp_path: Path, lines: list[dict[str, float]]) -> Path:
    with MetricLog(tmp_path / "metrics.jsonl") as log:
        for step, metrics in enumerate(lines):
            log.log(metrics, step)
    return tmp_path / "metrics.jsonl"


@pytest.mark.parametrize("name", LINES)
def test_a_picture_is_drawn(tmp_path: Path, name: str):
    png = draw_reward_curve(written(tmp_path, LINES[name]), tmp_path / "reward.png")
    assert png == tmp_path / "reward.png"
    height, width, _ = imread(png).shape
    assert (width, height) == (1200, 675)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "reward.png"]


@pytest.mark.parametrize("lines", [[], [{"train/loss": 1.0}], [{"rollout/reward_mean": float("nan")}]])
def test_without_a_reward_there_is_no_picture(tmp_path: Path, lines: list[dict[str, float]]):
    assert draw_reward_curve(written(tmp_path, lines), tmp_path / "reward.png") is None
    assert not (tmp_path / "reward.png").exists()


def test_curves_hold_what_was_logged(tmp_path: Path):
    lines = [
        {"eval/math/reward_mean": 0.5, "eval/math/reward_ci95": 0.2},
        {"rollout/reward_mean": 0.1, "rollout/reward_ci95": 0.3},
        {"rollout/reward_mean": 0.2},
        {"train/reward_mean": 9.0},
    ]
    curves = _read_curves(written(tmp_path, lines))
    assert list(curves) == ["rollout", "eval/math"]
    assert (curves["rollout"].steps, curves["rollout"].means, curves["rollout"].half_widths) == (
        [1, 2],
        [0.1, 0.2],
        [0.3, 0.0],
    )
    assert (curves["eval/math"].steps, curves["eval/math"].means, curves["eval/math"].half_widths) == (
        [0],
        [0.5],
        [0.2],
    )
