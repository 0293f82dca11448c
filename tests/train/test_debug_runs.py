"""Runs for those who look for a fault: half of the roles, saved rollouts, a check beforehand."""

from pathlib import Path

import pytest

from limes.check import shrink
from limes.cli import main
from limes.run import read_samples, read_train_records
from limes.train import run_train

pytestmark = pytest.mark.slow


def log_probs_of(run: Path, rollout_id: int) -> dict[int, tuple]:
    found = read_train_records(run / "rollouts", rollout_id)
    return {index: (record.advantages, record.log_probs) for index, record in found.items()}


def test_saved_rollouts_train_as_they_did(settings, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert run_train(settings(run__name="whole")) == 0
    replay = {"cluster__debug_train_only": True, "cluster__load_debug_rollout_data": str(runs / "whole")}
    assert run_train(settings(run__name="replayed", reward__kind="tiny_graders:equal", **replay)) == 0
    for rollout_id in range(3):
        assert log_probs_of(runs / "replayed", rollout_id) == log_probs_of(runs / "whole", rollout_id)
    weights = [runs / name / "checkpoints" / "000002" / "model" / "model.safetensors" for name in ("whole", "replayed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_without_a_trainer_every_rollout_has_the_first_weights(settings, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    assert run_train(settings(run__name="a", rollout__num_rollout=2, cluster__debug_rollout_only=True)) == 0
    samples = [sample for number in range(2) for sample in read_samples(run / "rollouts", number)]
    assert len(samples) == 32
    assert {version for sample in samples for version in sample.weight_versions} == {0}
    assert list((run / "checkpoints").iterdir()) == []
    assert not list((run / "rollouts").glob("*.train.jsonl"))


def test_rollouts_that_are_not_there_are_refused(settings, tmp_path: Path) -> None:
    replay = {"cluster__debug_train_only": True, "cluster__load_debug_rollout_data": str(tmp_path)}
    with pytest.raises(ValueError, match="no run folder, it lacks rollouts/"):
        run_train(settings(run__name="a", **replay))
    (tmp_path / "rollouts").mkdir()
    with pytest.raises(ValueError, match="holds 0 rollouts of the 3 that"):
        run_train(settings(run__name="a", **replay))


def test_a_trainer_that_leaves_between_steps_learns_the_same(settings, tmp_path: Path) -> None:
    assert run_train(settings(run__name="stays")) == 0
    assert run_train(settings(run__name="leaves", cluster__offload_train=True)) == 0
    runs = tmp_path / "runs"
    for name in (Path("model") / "model.safetensors", Path("optimizer.safetensors")):
        found = [(runs / run / "checkpoints" / "000002" / name).read_bytes() for run in ("stays", "leaves")]
        assert found[0] == found[1]


def flags(place: Path, tmp_path: Path, **changed: object) -> list[str]:
    values = {
        "model.path": place / "model",
        "model.chat_template": "none",
        "data.prompt_data": place / "data.jsonl",
        "rollout.num_rollout": 500,
        "rollout.n_samples_per_prompt": 16,
        "rollout.dynamic_sampling_filter": "nonzero_std",
        "trainer.num_steps_per_rollout": 8,
        "eval.interval": 1,
        "reward.kind": "last_integer",
        "run.dir": tmp_path / "runs",
        "cluster.kind": "ray",
        "cluster.actor_num_gpus_per_node": 8,
    } | {name.replace("__", "."): value for name, value in changed.items()}
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def test_a_check_trains_a_little_and_leaves_nothing(place: Path, tmp_path: Path, capfd) -> None:
    assert main(["train", *flags(place, tmp_path), "--check"]) == 0
    told = capfd.readouterr()
    assert "went through" in told.err
    assert " 1/2 " in told.out
    assert not (tmp_path / "runs").exists()


def test_a_check_finds_what_a_run_would_find_late(place: Path, tmp_path: Path, capfd) -> None:
    assert main(["train", *flags(place, tmp_path, reward__kind="no_such_module:reward"), "--check"]) == 2
    assert "no_such_module" in capfd.readouterr().err


def test_a_check_keeps_the_rest_of_the_settings(settings, tmp_path: Path) -> None:
    given = settings(algorithm__entropy_coef=0.1, trainer__lr=3e-4, rollout__temperature=0.7).config
    small = shrink(given, tmp_path, tmp_path)
    assert (small.algorithm, small.reward, small.data) == (given.algorithm, given.reward, given.data)
    assert (small.trainer.lr, small.rollout.temperature, small.model.device) == (3e-4, 0.7, "cpu")
