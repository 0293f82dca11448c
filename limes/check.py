"""`limes train --check`: two small steps of a recipe with a shrunken model, on this machine's CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from limes.config import Config, Resolved, load_config
from limes.config.derived import value_of
from limes.config.schema import leaves

LAYERS, HEADS, HEAD_DIM = 2, 4, 16
MOST = {
    "rollout.batch_size": 2,
    "rollout.n_samples_per_prompt": 4,
    "rollout.max_response_len": 16,
    "eval.num_prompts": 2,
    "eval.n_samples_per_prompt": 2,
    "run.num_shown_samples": 1,
}
"""Settings that a check lowers to this."""

AS_BY_DEFAULT = ("cluster", "weights")
"""Sections that say where roles run."""


def check(resolved: Resolved, run: Callable[[Resolved], int], tell: Callable[[str], None]) -> int:
    """Train two rollouts of the recipe's data, reward, algorithm and trainer; returns the exit code.

    Args:
        run: trains.
        tell: shows a line.

    Raises:
        ValueError: what the settings name cannot be had.
    """
    with tempfile.TemporaryDirectory(prefix="limes-check-") as place:
        shrink_model(resolved.config, Path(place) / "model", tell)
        small = shrink(resolved.config, Path(place) / "model", Path(place))
        code = run(Resolved(small, {}, resolved.recipe))
    if code == 0:
        tell("check: two steps with a shrunken model went through: data, reward, training, checkpoint")
    return code


def shrink(config: Config, model: Path, folder: Path) -> Config:
    """The settings of a check: those of the run with little to do, on one CPU."""
    changed: dict[str, Any] = {
        "model.path": str(model),
        "model.device": "cpu",
        "model.dtype": "float32",
        "rollout.num_rollout": 2,
        "rollout.over_sampling_batch_size": None,
        "rollout.dynamic_sampling_filter": None,  # a model that knows nothing has groups of equal rewards
        "engine.kv_cache_tokens": None,
        "engine.max_context_len": None,
        "checkpoint.load": None,
        "run.dir": str(folder / "runs"),
        "run.name": None,
        "run.trackers": [],
    }
    changed |= {path: min(value, most) for path, most in MOST.items() if (value := value_of(config, path)) is not None}
    longest = value_of(config, "eval.max_response_len")
    changed["eval.max_response_len"] = None if longest is None else min(longest, MOST["rollout.max_response_len"])
    changed["rollout.min_new_tokens"] = min(config.rollout.min_new_tokens, 1)
    num_samples = changed["rollout.batch_size"] * changed["rollout.n_samples_per_prompt"]
    steps = config.trainer.num_steps_per_rollout
    changed["trainer.num_steps_per_rollout"] = max(
        n for n in range(1, min(steps, num_samples) + 1) if num_samples % n == 0
    )
    changed["critic.num_critic_only_steps"] = min(config.critic.num_critic_only_steps, 1)
    for path in ("model.ref_path", "teacher.path", "critic.path"):
        if value_of(config, path) is not None:
            changed[path] = str(model)
    values = {path: value_of(config, path) for path in leaves() if path.partition(".")[0] not in AS_BY_DEFAULT}
    return load_config(None, values | changed)


def shrink_model(config: Config, folder: Path, tell: Callable[[str], None]) -> None:
    """Write a random model of the policy's kind, with its tokenizer and two small layers.

    Raises:
        ValueError: the model cannot be found, or is of a kind that limes does not serve.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from limes.models.load import refuse_unsupported
    from limes.models.source import resolve_model
    from limes.models.tokenizer import load_tokenizer

    source = resolve_model(config.model.path, notice=tell)
    settings = AutoConfig.from_pretrained(source, trust_remote_code=config.model.trust_remote_code)
    refuse_unsupported(settings, config.model.path)
    text = settings.get_text_config()
    heads = text.num_attention_heads
    grouped = (getattr(text, "num_key_value_heads", None) or heads) < heads
    small = {
        "num_hidden_layers": LAYERS,
        "hidden_size": HEADS * HEAD_DIM,
        "intermediate_size": 2 * HEADS * HEAD_DIM,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2 if grouped else HEADS,
        "head_dim": HEAD_DIM,
    }
    for name, value in small.items():
        if hasattr(text, name):
            setattr(text, name, value)
    kinds = getattr(text, "layer_types", None)
    if kinds:
        text.layer_types = [*kinds[:1], *kinds[-1:]]
    torch.manual_seed(config.run.seed)
    model = AutoModelForCausalLM.from_config(
        settings, dtype=torch.float32, trust_remote_code=config.model.trust_remote_code
    )
    model.save_pretrained(folder)
    load_tokenizer(source, config.model.chat_template).save_pretrained(folder)
