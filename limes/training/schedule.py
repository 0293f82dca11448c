"""The learning rate of each optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from limes.config.trainer import TrainerConfig


def learning_rate(step: int, total_steps: int, config: TrainerConfig) -> float:
    """Rate of optimizer step `step`, counted from 0, of a run of `total_steps`.

    Warm-up step i of w runs at lr * (i + 1) / w, so no step is wasted at 0. What follows goes from `lr` at its first
    step to `min_lr` at the run's last one, along the schedule's shape.
    """
    if step < config.lr_warmup_steps:
        return config.lr * (step + 1) / config.lr_warmup_steps
    num_after = total_steps - config.lr_warmup_steps
    progress = (step - config.lr_warmup_steps) / (num_after - 1) if num_after > 1 else 0.0
    share = _SHAPES[config.lr_schedule](min(progress, 1.0))
    return config.min_lr + (config.lr - config.min_lr) * share


_SHAPES: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "constant": lambda progress: 1.0,
        "linear": lambda progress: 1.0 - progress,
        "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    }
)
