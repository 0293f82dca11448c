"""The recipes that show that methods learn: their task, and runs from random weights."""

import importlib.util
import json
from pathlib import Path

import pytest

import limes
from limes.config import load_config
from limes.records import Sample
from limes.run import read_metrics

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes" / "learning").glob("*.toml"))


def module_at(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def task():
    return module_at(ROOT / "recipes" / "learning" / "task.py")


@pytest.fixture(scope="module")
def model(task, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learning") / "model"
    task.save_model(folder, seed=0)
    return folder


def answer(response: str, label: str, *, ended: bool) -> Sample:
    num = len(response) + ended
    sample = Sample(0, 0, response=response, label=label)
    sample.append_tokens([1] * num, log_probs=[-1.0] * num, weight_versions=[1] * num)
    return sample


@pytest.mark.parametrize(
    ("response", "ended", "reward", "steps"),
    [
        ("234", True, 1.0, [1, 1, 1, 1]),
        ("234", False, 1.0, [1, 1, 1]),
        ("204", True, 2 / 3, [1, 0, 1, 1]),
        ("23", True, 2 / 3, [1, 1, 0]),
        ("234400", False, 0.5, [1, 1, 1, 0, 0, 0]),
        ("", True, 0.0, [0]),
    ],
)
def test_an_answer_and_each_of_its_digits_are_scored(task, response, ended, reward, steps) -> None:
    assert task.share_right(answer(response, "234", ended=ended)) == pytest.approx(reward)
    stepped = answer(response, "234", ended=ended)
    assert task.share_right_in_steps(stepped) == pytest.approx(reward)
    found = stepped.metadata["step_wise"]
    assert found["step_scores"] == steps
    assert found["step_token_spans"] == [[i, i + 1] for i in range(stepped.response_length)]


def test_the_data_is_what_the_script_writes(task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = task.DATA.read_bytes()
    monkeypatch.setattr(task, "DATA", tmp_path / "count.jsonl")
    task.write_data()
    assert task.DATA.read_bytes() == written
    rows = [json.loads(line) for line in written.splitlines()]
    assert {"prompt": "302", "label": "34"} in rows


def test_recipes_differ_in_the_method_alone() -> None:
    """Data, budget and rate are the same: what the table compares is the method."""
    common = [load_config(path).model_dump(exclude={"algorithm", "reward", "critic"}) for path in RECIPES]
    assert all(settings == common[0] for settings in common)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_takes_steps(path: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = train(path, model, tmp_path, monkeypatch, {"rollout.num_rollout": 1, "critic.num_critic_only_steps": 0})
    assert any(line.get("train/grad_norm", 0.0) > 0 for line in metrics)


@pytest.mark.slow
def test_a_model_learns_from_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"rollout.num_rollout": 16, "trainer.lr": 1e-3, "eval.interval": None}
    metrics = train(ROOT / "recipes" / "learning" / "step_wise.toml", model, tmp_path, monkeypatch, changes)
    rewards = [line["rollout/reward_mean"] for line in metrics if "rollout/reward_mean" in line]
    assert rewards[0] < 0.2
    assert sum(rewards[-3:]) / 3 > 0.6


def train(
    path: Path, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> list[dict[str, float]]:
    """Train with a recipe on the CPU; returns the lines of `metrics.jsonl`."""
    monkeypatch.syspath_prepend(str(ROOT))
    if load_config(path).algorithm.advantage_estimator != "ppo":
        changes = {name: value for name, value in changes.items() if not name.startswith("critic.")}
    places = {"model.path": str(model), "model.device": "cpu", "run.dir": str(folder), "run.name": "a"}
    assert limes.train(load_config(path, places | {"run.num_shown_samples": 0} | changes)) == 0
    return list(read_metrics(folder / "a" / "metrics.jsonl"))
