"""A tiny model with prompts and graders, and settings that train it in seconds."""

import json
import sys
from pathlib import Path

import pytest
from tiny import save_tiny

from limes.config import Resolved, load_config

GRADERS = """
def digits(sample):
    return float(sum(character.isdigit() for character in sample.response) % 2)

def equal(sample):
    return 1.0

def broken(sample):
    if sample.index % 4 == 1:
        raise RuntimeError("no ruler")
    return float(sample.index % 2)
"""


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, prompts and graders."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder / "model")
    rows = [{"prompt": f"say {i}", "label": str(i % 10)} for i in range(20)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tiny_graders.py").write_text(GRADERS)
    return folder


@pytest.fixture
def settings(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Settings with changes: `settings(trainer__lr=1e-4)`; runs lie in `tmp_path / "runs"`."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(place)])

    def make(**values: object) -> Resolved:
        base = {
            "model.path": str(place / "model"),
            "data.prompt_data": str(place / "data.jsonl"),
            "rollout.num_rollout": 3,
            "rollout.batch_size": 4,
            "rollout.n_samples_per_prompt": 4,
            "rollout.max_response_len": 12,
            "reward.kind": "tiny_graders:digits",
            "eval.num_prompts": 4,
            "trainer.lr": 1e-3,
            "run.dir": str(tmp_path / "runs"),
            "run.num_shown_samples": 0,
        }
        named = {name.replace("__", "."): value for name, value in values.items()}
        return Resolved(load_config(None, base | named), {})

    return make
