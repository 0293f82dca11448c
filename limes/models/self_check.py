"""A model that attends through plans must say what it said by itself: tried once, on two short sequences, at loading.

Architectures differ in ways that no list of names keeps up with: attention of their own that ignores plans, a bias or a
scale behind the LM head, state that runs from token to token. Each would train another model than the one that was
loaded, without a word.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from limes.models.attention import Row, TreeAttention
from limes.models.cpu_linear import head_logits
from limes.models.policy import Policy, kv_shape, num_layers

if TYPE_CHECKING:
    from limes.models.value_head import ValueModel

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
def own_outputs(model: PreTrainedModel) -> Tensor:
    """What the model gives after each token of the probe, before it attends through plans: `[N, V]` logits, or `[N, E]`
    hidden states where it has no LM head."""
    return torch.cat([model(input_ids=part[None], use_cache=False)[0][0] for part in _probe(model).split(LENGTHS)])


@torch.no_grad()
def check_served(policy: Policy, own_NV: Tensor) -> None:
    """Compare next-token distributions with those of `own_outputs`.

    Raises:
        ValueError: says what differs.
    """
    if getattr(policy.model.get_output_embeddings(), "bias", None) is not None:
        raise ValueError("its LM head has a bias")
    logits_NV = head_logits(_packed(policy, policy.model), policy.head_weight)
    distance_N = (logits_NV.float().softmax(-1) - own_NV.float().softmax(-1)).abs().sum(-1) / 2
    _refuse_far("next-token distribution", distance_N, "total variation", policy.dtype)


@torch.no_grad()
def check_hidden(model: ValueModel, own_NE: Tensor) -> None:
    """Compare hidden states with those of `own_outputs`.

    Raises:
        ValueError: says what differs.
    """
    hidden_NE, own_NE = _packed(model, model.backbone).float(), own_NE.float()
    distance_N = (hidden_NE - own_NE).norm(dim=-1) / own_NE.norm(dim=-1)
    _refuse_far("final hidden state", distance_N, "relative distance", model.backbone.dtype)


def _packed(model: Policy | ValueModel, network: PreTrainedModel) -> Tensor:
    """Final hidden states of the probe, packed, `[N, E]`."""
    plan = ProbePlan(model.device)
    positions = torch.cat([torch.arange(num) for num in LENGTHS]).to(model.device)
    hidden_NE = model.hidden(_probe(network), positions, plan)
    layers, shape = num_layers(network), kv_shape(network)
    if sorted(plan.layers) != list(range(layers)):
        raise ValueError(f"its {layers} layers attend by themselves: {plan.layers} use packed attention")
    if plan.key_shapes != {shape}:
        raise ValueError(f"the heads of its keys and values are {sorted(plan.key_shapes)}, not {shape} alone")
    return hidden_NE


def _refuse_far(what: str, distance_N: Tensor, measure: str, dtype: torch.dtype) -> None:
    distance, limit = distance_N.max().item(), LIMITS.get(dtype, LIMIT_OF_SHORT_TYPES)
    if not distance <= limit:
        raise ValueError(
            f"packed, its {what} differs from the model's own by {distance:.3g} ({measure}; {limit:g} at most)"
        )


def _probe(model: PreTrainedModel) -> Tensor:
    vocab_size = model.get_input_embeddings().weight.shape[0]
    return (torch.arange(1, sum(LENGTHS) + 1, device=model.device) * 7919) % vocab_size
