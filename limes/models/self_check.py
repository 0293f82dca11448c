"""A model that attends through plans must say what it said by itself: tried once, on two short sequences, at loading.

Architectures differ in ways that no list of names keeps up with: attention of their own that ignores plans, a bias or a
scale behind the LM head, state that runs from token to token. Each would train another model than the one that was
loaded, without a word.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from limes.models.attention import Row, TreeAttention
from limes.models.cpu_linear import head_logits
from limes.models.policy import Policy

LENGTHS = (7, 5)
LIMITS = {torch.float64: 1e-3, torch.float32: 1e-3}
LIMIT_OF_SHORT_TYPES = 0.2


class ProbePlan(TreeAttention):
    """Separate sequences, end to end; notes which layers called it, and with what."""

    def __init__(self, device: torch.device) -> None:
        starts = [0, *accumulate(LENGTHS)]
        rows = [Row(start, num, start + np.arange(num)) for start, num in zip(starts, LENGTHS, strict=False)]
        super().__init__(rows, starts[-1], device)
        self.layers: list[int] = []
        self.key_shapes: set[tuple[int, int]] = set()

    def attend(self, layer: int, query_HND: Tensor, key_KND: Tensor, value_KND: Tensor, scale: float) -> Tensor:
        """See `AttentionPlan.attend`."""
        self.layers.append(layer)
        self.key_shapes |= {(x.shape[0], x.shape[2]) for x in (key_KND, value_KND)}
        return super().attend(layer, query_HND, key_KND, value_KND, scale)


@torch.no_grad()
def own_distributions(model: PreTrainedModel) -> Tensor:
    """What the model says after each token of the probe, `[N, V]`, before it attends through plans."""
    logits = [model(input_ids=part[None], use_cache=False).logits[0] for part in _probe(model).split(LENGTHS)]
    return torch.cat(logits).float().softmax(-1)


@torch.no_grad()
def check_served(policy: Policy, expected_NV: Tensor) -> None:
    """Compare with `own_distributions`.

    Raises:
        ValueError: says what differs.
    """
    if getattr(policy.model.get_output_embeddings(), "bias", None) is not None:
        raise ValueError("its LM head has a bias")
    plan = ProbePlan(policy.device)
    positions = torch.cat([torch.arange(num) for num in LENGTHS]).to(policy.device)
    hidden = policy.hidden(_probe(policy.model), positions, plan)
    if sorted(plan.layers) != list(range(policy.num_layers)):
        raise ValueError(f"its {policy.num_layers} layers attend by themselves: {plan.layers} use packed attention")
    if plan.key_shapes != {policy.kv_shape}:
        raise ValueError(f"the heads of its keys and values are {sorted(plan.key_shapes)}, not {policy.kv_shape} alone")
    found_NV = head_logits(hidden, policy.head_weight).float().softmax(-1)
    distance = (found_NV - expected_NV).abs().sum(-1).max().item() / 2
    limit = LIMITS.get(policy.dtype, LIMIT_OF_SHORT_TYPES)
    if not distance <= limit:
        raise ValueError(
            f"packed, its next-token distribution differs from the model's own by {distance:.3g} (total variation; "
            f"{limit:g} at most)"
        )


def _probe(model: PreTrainedModel) -> Tensor:
    vocab_size = model.get_input_embeddings().weight.shape[0]
    return (torch.arange(1, sum(LENGTHS) + 1, device=model.device) * 7919) % vocab_size
