"""Pure maths on tensors: advantages, losses, KL, corrections, distillation, aggregation.

Everything works on packed 1-D tensors: the tokens of many sequences end to end, and `lengths`, the number of tokens of
each. Nothing here knows of models, devices' ranks or settings files, and nothing keeps state.
"""

from limes.algorithms import (
    advantages,
    corrections,
    distill,
    estimators,
    hints,
    kl,
    metrics,
    objective,
    policy_loss,
    sft,
    stepwise,
    value_loss,
)
from limes.algorithms.aggregate import aggregate, step_total

__all__ = [
    "advantages",
    "aggregate",
    "corrections",
    "distill",
    "estimators",
    "hints",
    "kl",
    "metrics",
    "objective",
    "policy_loss",
    "sft",
    "step_total",
    "stepwise",
    "value_loss",
]
