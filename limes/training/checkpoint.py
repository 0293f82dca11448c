"""What a train worker saves: a plain model folder, and the optimizer beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from limes.models.policy import Policy
from limes.training.optimizer import PolicyOptimizer

MODEL = "model"
OPTIMIZER = "optimizer.safetensors"
TRAINER = "trainer.json"
CRITIC = "critic"
"""Folder of the critic's own three, inside the actor's."""


def save(folder: Path, policy: Policy, optimizer: PolicyOptimizer, state: dict[str, Any]) -> None:
    """Write `model/`, loadable by transformers as it is, `optimizer.safetensors` and `trainer.json`."""
    policy.model.save_pretrained(folder / MODEL)
    policy.tokenizer.save_pretrained(folder / MODEL)
    save_optimizer(folder, optimizer)
    (folder / TRAINER).write_text(json.dumps(state), encoding="utf-8")


def load(folder: Path, policy: Policy, optimizer: PolicyOptimizer) -> dict[str, Any]:
    """Copy saved weights into the policy's own tensors and restore the optimizer; returns the saved state.

    Raises:
        ValueError: the folder is no checkpoint, or one of another model.
    """
    refuse_incomplete(folder)
    load_weights(folder / MODEL, policy)
    load_optimizer(folder, optimizer)
    state: dict[str, Any] = json.loads((folder / TRAINER).read_text(encoding="utf-8"))
    return state


def save_optimizer(folder: Path, optimizer: PolicyOptimizer) -> None:
    """Write `optimizer.safetensors`."""
    flat: dict[str, Tensor] = {}
    for name, values in optimizer.state_dict().items():
        flat |= {f"{name}/{key}": value.contiguous() for key, value in values.items()}
    save_file(flat, folder / OPTIMIZER)


def load_optimizer(folder: Path, optimizer: PolicyOptimizer) -> None:
    """Restore what `save_optimizer` wrote.

    Raises:
        ValueError: it is of another model.
    """
    by_name: dict[str, dict[str, Tensor]] = {name: {} for name in optimizer.names}
    for key, value in load_file(folder / OPTIMIZER).items():
        name, _, entry = key.rpartition("/")
        by_name.setdefault(name, {})[entry] = value
    optimizer.load_state_dict(by_name)


def refuse_incomplete(folder: Path) -> None:
    """A worker's part of a checkpoint is whole.

    Raises:
        ValueError: it is not.
    """
    missing = [name for name in (MODEL, OPTIMIZER, TRAINER) if not (folder / name).exists()]
    if missing:
        raise ValueError(f"checkpoint.load = {folder}: not a checkpoint, it lacks {', '.join(missing)}")


def load_weights(folder: Path, policy: Policy) -> None:
    """Copy a model folder's weights into the policy, tensor by tensor, where they lie.

    Raises:
        ValueError: names or shapes differ.
    """
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=policy.dtype)
    own, new = dict(policy.model.named_parameters()), dict(saved.named_parameters())
    wrong = [n for n in {**own, **new} if n not in own or n not in new or own[n].shape != new[n].shape]
    if wrong:
        raise ValueError(f"{folder} holds another model: {wrong[:3]} and {len(wrong)} tensors in all differ")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(new[name])
