"""PPO with a critic through the whole system on a tiny model."""

import json
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from limes.config import Resolved, load_config
from limes.run import read_metrics, read_samples, read_train_records
from limes.train import run_train

pytestmark = pytest.mark.slow

RECIPE = Path(__file__).parents[2] / "recipes" / "algorithms" / "ppo.toml"


@pytest.fixture
def settings(settings):
    """Those of all runs, with a critic."""
    critic = {"algorithm__advantage_estimator": "ppo", "critic__lr": 1e-2, "checkpoint__save_interval": 1}
    return partial(settings, rollout__n_samples_per_prompt=2, **critic)


def steps_with(run: Path, name: str) -> dict[int, float]:
    return {line["step"]: line[name] for line in read_metrics(run / "metrics.jsonl") if name in line}


def versions(run: Path, rollout_id: int) -> set[int]:
    return {version for sample in read_samples(run / "rollouts", rollout_id) for version in sample.weight_versions}


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_critic_and_actor_train_and_report(settings, tmp_path: Path, kl_coef: float) -> None:
    assert run_train(settings(run__name="a", algorithm__kl_coef=kl_coef, checkpoint__save_interval=None)) == 0
    run = tmp_path / "runs" / "a"
    names = ("train/loss", "train/value_loss", "train/value_clipfrac", "train/critic_grad_norm", "train/critic_lr")
    for name in (*names, "train/grad_norm"):
        assert set(steps_with(run, name)) == {0, 1, 2}, name
    assert steps_with(run, "train/explained_variance")[0] == pytest.approx(0.0, abs=1e-6)
    records = read_train_records(run / "rollouts", 2)
    assert any(len(set(record.advantages)) > 1 for record in records.values())  # values differ from token to token
    assert {"actor.train", "critic.report", "critic.save_model"} <= {
        json.loads(line)["name"] for line in (run / "spans.jsonl").read_text().splitlines()
    }


def test_while_the_critic_learns_alone_no_bit_of_the_actor_moves(settings, tmp_path: Path, place: Path) -> None:
    assert run_train(settings(run__name="a", critic__num_critic_only_steps=2, eval__interval=1)) == 0
    run = tmp_path / "runs" / "a"
    checkpoints = run / "checkpoints"
    assert [files(checkpoints / f"00000{i}") for i in range(2)] == [["critic", "rollout.json"]] * 2
    assert files(checkpoints / "000002") == ["critic", "model", "optimizer.safetensors", "rollout.json", "trainer.json"]
    assert files(checkpoints / "000002" / "critic") == ["model", "optimizer.safetensors", "trainer.json"]
    assert [versions(run, i) for i in range(3)] == [{1}, {2}, {3}]  # the same weights, handed over anew each time
    assert set(steps_with(run, "train/loss")) == {2}
    assert set(steps_with(run, "train/value_loss")) == {0, 1, 2}
    assert set(steps_with(run, "eval/reward_mean")) == {0, 3}
    moved = load_file(checkpoints / "000002" / "model" / "model.safetensors")
    start = load_file(place / "model" / "model.safetensors")
    assert any((moved[name] != start[name]).any() for name in start)


def test_a_critic_that_learned_alone_leaves_a_checkpoint_that_samples_as_the_start_does(
    settings, tmp_path: Path
) -> None:
    alone = {"critic__num_critic_only_steps": 2}
    assert run_train(settings(run__name="a", rollout__num_rollout=3, **alone)) == 0
    checkpoint = str(tmp_path / "runs" / "a" / "checkpoints" / "000001")
    for name, options in {"start": {}, "alone": {"checkpoint__load": checkpoint}}.items():
        assert run_train(settings(run__name=name, rollout__num_rollout=0, **alone, **options)) == 0
    found = [
        [(s.tokens, s.rollout_log_probs) for s in read_samples(tmp_path / "runs" / name / "rollouts", 0, "eval")]
        for name in ("start", "alone")
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("saved", [0, 2])
def test_a_checkpoint_goes_on_as_if_nothing_was(settings, tmp_path: Path, saved: int) -> None:
    """From one of the critic alone (0) and from one of both (2)."""
    options = {"critic__num_critic_only_steps": 2, "rollout__num_rollout": 4, "critic__lr_schedule": "cosine"}
    runs = tmp_path / "runs"
    assert run_train(settings(run__name="straight", **options)) == 0
    checkpoint = runs / "straight" / "checkpoints" / f"00000{saved}"
    assert run_train(settings(run__name="resumed", checkpoint__load=str(checkpoint), **options)) == 0
    for part in ("model/model.safetensors", "critic/model/model.safetensors", "critic/model/value_head.safetensors"):
        one, two = (load_file(runs / name / "checkpoints" / "000003" / part) for name in ("straight", "resumed"))
        assert one.keys() == two.keys()
        assert all((one[name] == two[name]).all() for name in one), part
    assert versions(runs / "resumed", 3) == versions(runs / "straight", 3) == {4}


def test_an_earlier_critic_can_be_the_start_of_another(settings, tmp_path: Path) -> None:
    assert run_train(settings(run__name="a", rollout__num_rollout=4, critic__num_critic_only_steps=3)) == 0
    checkpoint = str(tmp_path / "runs" / "a" / "checkpoints" / "000002")
    assert run_train(settings(run__name="b", rollout__num_rollout=1, critic__path=checkpoint)) == 0
    first, second = (steps_with(tmp_path / "runs" / name, "train/explained_variance")[0] for name in ("a", "b"))
    assert first == pytest.approx(0.0, abs=1e-6)
    assert second != pytest.approx(0.0, abs=1e-3)  # its head no longer says 0 for everything


def test_a_critic_that_cannot_be_had_is_refused(settings, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"critic\.path = .*nowhere: no such folder"):
        run_train(settings(run__name="a", critic__path=str(tmp_path / "nowhere")))


def test_a_checkpoint_without_a_critic_is_refused(settings, tmp_path: Path) -> None:
    grpo = {"algorithm__advantage_estimator": "grpo", "critic__lr": 1e-5}
    assert run_train(settings(run__name="a", rollout__num_rollout=1, **grpo)) == 0
    checkpoint = tmp_path / "runs" / "a" / "checkpoints" / "000000"
    with pytest.raises(ValueError, match=r"checkpoint\.load = .*critic: not a checkpoint, it lacks model"):
        run_train(settings(run__name="b", checkpoint__load=str(checkpoint)))


def test_the_recipe_runs(place: Path, tmp_path: Path) -> None:
    overrides = {
        "model.path": str(place / "model"),
        "rollout.num_rollout": 2,
        "rollout.batch_size": 4,
        "critic.num_critic_only_steps": 1,
        "run.dir": str(tmp_path),
        "run.name": "recipe",
        "run.num_shown_samples": 0,
    }
    config = load_config(RECIPE, overrides)
    assert Path(config.data.prompt_data.partition("@[")[0]).is_file()
    assert load_config(RECIPE).critic.num_critic_only_steps > 0
    assert run_train(Resolved(config, {}, RECIPE)) == 0
    assert set(steps_with(tmp_path / "recipe", "train/value_loss")) == {0, 1}


def test_a_checkpoint_of_the_critic_alone_says_what_it_lacks(settings, tmp_path: Path) -> None:
    assert run_train(settings(run__name="a", rollout__num_rollout=3, critic__num_critic_only_steps=2)) == 0
    checkpoint = str(tmp_path / "runs" / "a" / "checkpoints" / "000001")
    for algorithm in ("ppo", "grpo"):
        fewer = settings(checkpoint__load=checkpoint, algorithm__advantage_estimator=algorithm, critic__lr=1e-5)
        with pytest.raises(ValueError, match=r"holds no actor.*num_critic_only_steps is 0; set it to 2 or more"):
            run_train(fewer)
