"""docs/algorithms.md stays true: its tests exist, its settings load, and no method is left out."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from limes.algorithms import corrections, distill, estimators, hints, kl, policy_loss
from limes.algorithms.aggregate import AGGREGATIONS
from limes.config import Config, load_config
from limes.run.metrics import METRICS

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")

ENTRY = re.compile(r"^#{2,3} (.+)\n((?:(?!^#{2,3} ).*\n)*)", re.MULTILINE)
BLOCK = re.compile(r"^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROOF = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
RECIPE = re.compile(r"^- Recipe: `([\w/.]+)`$", re.MULTILINE)

ENTRIES: dict[str, str] = dict(ENTRY.findall(TEXT))
TABLES = {
    "advantage_estimator": tuple(estimators.ESTIMATORS),
    "policy_loss": tuple(policy_loss.POLICY_LOSSES),
    "aggregation": AGGREGATIONS,
    "correction": tuple(corrections.CORRECTIONS),
}
FITTED_TO_THE_TASK = {"overlong_buffer", "kl_coef", "kl_loss_coef", "lambd", "opsm_delta"}
"""Numbers that a recipe may have otherwise than the paper does."""


def named_in(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


@cache
def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}


def loaded(block: str, folder: Path) -> Config:
    (folder / "block.toml").write_text(block, encoding="utf-8")
    tomllib.loads(block)
    return load_config(folder / "block.toml", {"rollout.num_rollout": 100})


def test_the_entries_are_found_at_all() -> None:
    assert len(ENTRIES) > 35
    assert sum(len(BLOCK.findall(body)) for body in ENTRIES.values()) == TEXT.count("```toml") > 25
    assert len(PROOF.findall(TEXT)) > 70


def test_every_test_that_is_named_exists() -> None:
    missing = []
    for name, function in PROOF.findall(TEXT):
        path = ROOT / name
        if not path.is_file() or (function and function not in functions_of(path)):
            missing.append(f"{name}::{function}")
    assert missing == []


@pytest.mark.parametrize("heading", [heading for heading, body in ENTRIES.items() if "```toml" in body])
def test_settings_load_and_are_proved(heading: str, tmp_path: Path) -> None:
    body = ENTRIES[heading]
    (block,) = BLOCK.findall(body)
    config = loaded(block, tmp_path)
    assert "- Proof:" in body
    for setting, names in TABLES.items():
        wanted = [name for name in names if name in named_in(heading)]
        if wanted and "KL" not in heading:
            assert getattr(config.algorithm, setting) in wanted


def test_every_method_has_an_entry() -> None:
    headings = {name for heading in ENTRIES for name in named_in(heading)}
    assert {name for names in TABLES.values() for name in names} - headings == set()
    assert set(kl.KINDS) - headings == set()
    assert set(hints._PICKS) - headings == set()
    (divergence,) = (body for heading, body in ENTRIES.items() if "`topk_loss`" in heading)
    words = set(re.findall(r"\w+", divergence))
    assert {*distill._SUPPORTS, *distill._DIRECTIONS, *distill._TAILS} - words == set()


@pytest.mark.parametrize("heading", [heading for heading, body in ENTRIES.items() if RECIPE.search(body)])
def test_a_recipe_has_the_settings_of_its_entry(heading: str, tmp_path: Path) -> None:
    body = ENTRIES[heading]
    (block,), (recipe,) = BLOCK.findall(body), RECIPE.findall(body)
    entry, run = loaded(block, tmp_path), load_config(ROOT / recipe)
    for name in type(entry.algorithm).model_fields:
        ours, theirs = getattr(entry.algorithm, name), getattr(run.algorithm, name)
        if name not in FITTED_TO_THE_TASK:
            assert ours == theirs, f"algorithm.{name}"
        else:
            assert bool(ours) == bool(theirs), f"algorithm.{name}"
    assert entry.rollout.dynamic_sampling_filter == run.rollout.dynamic_sampling_filter


def test_every_recipe_of_a_method_has_an_entry() -> None:
    named = set(RECIPE.findall(TEXT))
    assert {f"recipes/algorithms/{path.name}" for path in (ROOT / "recipes" / "algorithms").glob("*.toml")} <= named


def test_the_metrics_of_training_are_declared() -> None:
    named = set(re.findall(r"`(train/\w+)`", TEXT))
    assert len(named) > 10
    assert named - set(METRICS) == set()
