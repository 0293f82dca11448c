"""The recipes of methods: each loads, and each trains on a rollout of a tiny model."""

import json
from pathlib import Path

import pytest
from tiny import save_tiny

import limes
from limes.config import load_config

RECIPES = sorted((Path(__file__).parents[2] / "recipes" / "algorithms").glob("*.toml"))


def test_there_is_a_recipe_for_each_method() -> None:
    found = {path.stem for path in RECIPES}
    assert found >= {"grpo", "dapo", "dr_grpo", "rloo", "gspo", "cispo", "ppo", "deepseek_v3_2"}
    assert found >= {"reinforce_plus_plus", "reinforce_plus_plus_baseline"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains(path: Path, tmp_path: Path) -> None:
    assert Path(load_config(path).data.prompt_data).is_file()
    model = save_tiny(tmp_path / "model", num_layers=1, hidden_size=16)
    changes = {
        "model.path": str(model),
        "rollout.num_rollout": 1,
        "rollout.batch_size": 2,
        "rollout.n_samples_per_prompt": 4,
        "rollout.over_sampling_batch_size": None,
        "reward.kind": "algorithm_cases:sum_of_tokens",
        "trainer.lr_warmup_steps": 0,
        "critic.num_critic_only_steps": 0,
        "run.dir": str(tmp_path / "runs"),
        "run.name": "a",
    }
    config = load_config(path, changes)
    assert limes.train(config) == 0
    lines = (tmp_path / "runs" / "a" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    values = {}
    for line in lines:
        values |= json.loads(line)
    flat = json.dumps(values)
    assert "train/grad_norm" in flat
    assert "train/skipped" not in flat
