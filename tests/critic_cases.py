"""Tiny critics for the tests of training."""

from __future__ import annotations

from typing import Any

import torch
from tiny import tiny_model
from training_cases import make_config

from limes.config import Config
from limes.models.value_head import ValueModel, make_value_model
from limes.training.critic import CriticWorker


def exact_critic(seed: int = 0, *, head: float = 0.3, dtype: torch.dtype = torch.float64) -> ValueModel:
    """A tiny critic in float64; `head` is the size of its head's weights."""
    model = make_value_model(tiny_model(seed=seed, dtype=dtype).model)
    torch.manual_seed(seed)
    torch.nn.init.normal_(model.head.weight, std=head or 1.0)
    with torch.no_grad():
        model.head.weight.mul_(float(head != 0))
    return model


def ppo_config(**sections: dict[str, Any]) -> Config:
    """Settings of a small run with a critic."""
    base = {"algorithm": {"advantage_estimator": "ppo"}, "critic": {"lr": 1e-2}}
    return make_config(**{name: base.get(name, {}) | sections.get(name, {}) for name in {**base, **sections}})


def critic_for(config: Config, seed: int = 0, **options: Any) -> CriticWorker:
    """A worker on a tiny critic."""
    return CriticWorker(exact_critic(seed, **options), config)


def critic_parameters(worker: CriticWorker) -> torch.Tensor:
    """All parameters in one vector, a copy."""
    return torch.cat([p.detach().flatten().clone() for _, p in worker.model.named_parameters()])
