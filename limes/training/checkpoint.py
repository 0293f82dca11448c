"""What a train worker saves: a plain model folder, and the optimizer beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from limes.models.policy import Policy
from limes.training.folders import CRITIC, MODEL, OPTIMIZER, TRAINER, optimizer_files, refuse_incomplete
from limes.training.optimizer import PolicyOptimizer
from limes.training.parallel.boxes import PartsReader
from limes.training.parallel.checkpoint import (
    load_model_folder,
    load_optimizer_parts,
    save_model_folder,
    save_optimizer_parts,
)
from limes.training.parallel.models import ShardedPolicy, ranks_of
from limes.training.parallel.optimizer import ShardedOptimizer

__all__ = [
    "CRITIC",
    "MODEL",
    "OPTIMIZER",
    "TRAINER",
    "load",
    "load_optimizer",
    "load_state",
    "load_weights",
    "refuse_incomplete",
    "save",
    "save_optimizer",
    "save_state",
    "save_weights",
]


def save(folder: Path, policy: Policy, optimizer: PolicyOptimizer, state: dict[str, Any]) -> None:
    """Write `model/`, loadable by transformers as it is, `optimizer.safetensors` and `trainer.json`.

    Of a policy on many ranks, all of them make this call, and the optimizer has a file a rank.
    """
    save_weights(folder / MODEL, policy)
    save_optimizer(folder, optimizer)
    save_state(folder, optimizer, state)


def save_weights(folder: Path, policy: Policy) -> None:
    """Write a plain model folder, with the tokenizer."""
    if isinstance(policy, ShardedPolicy):
        save_model_folder(folder, policy.sharded, policy.model, policy.tokenizer)
        return
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


def save_state(folder: Path, optimizer: PolicyOptimizer, state: dict[str, Any]) -> None:
    """Write `trainer.json`, once."""
    if not isinstance(optimizer, ShardedOptimizer) or optimizer.model.ranks.is_first:
        (folder / TRAINER).write_text(json.dumps(state), encoding="utf-8")


def load(folder: Path, policy: Policy, optimizer: PolicyOptimizer) -> dict[str, Any]:
    """Copy saved weights into the policy's own tensors and restore the optimizer; returns the saved state.

    Raises:
        ValueError: the folder is no checkpoint, or one of another model.
    """
    with ranks_of(policy).together(f"loading {folder}"):
        refuse_incomplete(folder)
    load_weights(folder / MODEL, policy)
    load_optimizer(folder, optimizer)
    return load_state(folder)


def load_state(folder: Path) -> dict[str, Any]:
    """Read `trainer.json`."""
    state: dict[str, Any] = json.loads((folder / TRAINER).read_text(encoding="utf-8"))
    return state


def save_optimizer(folder: Path, optimizer: PolicyOptimizer) -> None:
    """Write `optimizer.safetensors`, or this rank's part of it."""
    if isinstance(optimizer, ShardedOptimizer):
        with optimizer.model.ranks.together(f"saving {folder}"):
            save_optimizer_parts(folder, optimizer)
        return
    flat: dict[str, Tensor] = {}
    for name, values in optimizer.state_dict().items():
        flat |= {f"{name}/{key}": value.contiguous() for key, value in values.items()}
    save_file(flat, folder / OPTIMIZER)


def load_optimizer(folder: Path, optimizer: PolicyOptimizer) -> None:
    """Restore what `save_optimizer` wrote.

    Raises:
        ValueError: it is of another model.
    """
    if isinstance(optimizer, ShardedOptimizer):
        with optimizer.model.ranks.together(f"loading {folder}"):
            load_optimizer_parts(folder, optimizer)
        return
    by_name: dict[str, dict[str, Tensor]] = {name: {} for name in optimizer.names}
    with PartsReader(optimizer_files(folder)) as reader:
        for key in sorted(reader.shapes):
            name, _, entry = key.rpartition("/")
            by_name.setdefault(name, {})[entry] = reader.read(key)
    optimizer.load_state_dict(by_name)


def load_weights(folder: Path, policy: Policy) -> None:
    """Copy a model folder's weights into the policy, tensor by tensor, where they lie.

    Raises:
        ValueError: names or shapes differ.
    """
    if isinstance(policy, ShardedPolicy):
        with policy.sharded.ranks.together(f"loading {folder}"):
            load_model_folder(folder, policy.sharded, policy.model)
        return
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=policy.dtype)
    own, new = dict(policy.model.named_parameters()), dict(saved.named_parameters())
    wrong = [n for n in {**own, **new} if n not in own or n not in new or own[n].shape != new[n].shape]
    if wrong:
        raise ValueError(f"{folder} holds another model: {wrong[:3]} and {len(wrong)} tensors in all differ")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(new[name])
