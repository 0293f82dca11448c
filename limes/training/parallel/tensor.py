"""Tensor parallelism by transformers' plans: each rank keeps its heads and columns of a layer, and its rows of the
vocabulary. The slices are plain tensors, so that sharding, optimizer and checkpoints treat them like any other."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from limes.training.parallel.collectives import copy_to, reduce_from

SETTING = "trainer.tensor_model_parallel_size"
COLUMNS, ROWS, WHOLE, EMBEDDING, HEAD = (
    "colwise",
    "rowwise",
    "replicated_with_grad_allreduce",
    "embedding_rowwise",
    "colwise_gather_output",
)


class SharedInput:
    """The input that neighbouring layers have in common, such as those of queries, keys and values: its gradient is
    summed over ranks once for all of them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.num_layers = 0
        self._group = group
        self._latest: tuple[Tensor, Tensor] | None = None
        self._num_uses = 0

    def of(self, x: Tensor) -> Tensor:
        """`x` for one of the layers; let go of after the last of them."""
        if self._latest is None or self._latest[0] is not x:
            self._latest, self._num_uses = (x, copy_to(x, self._group)), 0
        self._num_uses += 1
        found = self._latest[1]
        if self._num_uses == self.num_layers:
            self._latest = None
        return found


class ColumnLinear(nn.Linear):
    """This rank's columns of the output."""

    tp_input: SharedInput

    def forward(self, x: Tensor) -> Tensor:
        """`[..., own columns]`."""
        return F.linear(self.tp_input.of(x), self.weight, self.bias)


class RowLinear(nn.Linear):
    """This rank's columns of the input; outputs of all ranks add up."""

    tp_group: dist.ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear` on the whole input."""
        y = reduce_from(F.linear(x, self.weight), self.tp_group)
        return y if self.bias is None else y + self.bias


class VocabEmbedding(nn.Embedding):
    """This rank's rows of the vocabulary, from `first_row` on."""

    tp_group: dist.ProcessGroup
    first_row: int

    def forward(self, token_ids: Tensor) -> Tensor:
        """As `nn.Embedding` of the whole vocabulary."""
        own = token_ids - self.first_row
        foreign = (own < 0) | (own >= len(self.weight))
        padding = None if self.padding_idx is None else self.padding_idx - self.first_row
        if padding is not None and not 0 <= padding < len(self.weight):
            padding = None
        rows = F.embedding(own.masked_fill(foreign, 0), self.weight, padding_idx=padding)
        return reduce_from(rows.masked_fill(foreign.unsqueeze(-1), 0.0), self.tp_group)


@dataclass(frozen=True)
class TensorPlan:
    """How the parameters of a model are cut; by name within the model.

    Attributes:
        dims: dimension that a parameter is cut along; the others are whole on every rank.
        partial: whole parameters of which each rank has a part of the gradient.
        vocab_head: the LM head is cut along the vocabulary.
    """

    dims: dict[str, int]
    partial: frozenset[str]
    vocab_head: bool


NO_PLAN = TensorPlan({}, frozenset(), False)


def plan_tensor_parallel(model: PreTrainedModel, tp: int) -> TensorPlan:
    """The cut of a model over `tp` ranks.

    Raises:
        ValueError: the model has no plan, one that is not served, or numbers that `tp` does not divide.
    """
    if tp == 1:
        return NO_PLAN
    check_divides(model, tp)
    plan = dict(model.tp_plan or {})
    dims: dict[str, int] = {}
    partial: set[str] = set()
    for name, module in model.named_modules():
        style = plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))
        if style is None or style in (EMBEDDING, HEAD):
            continue
        if style == WHOLE:
            partial |= {f"{name}.{own}" for own, _ in module.named_parameters()}
        elif style in (COLUMNS, ROWS) and isinstance(module, nn.Linear):
            dims[f"{name}.weight"] = 0 if style == COLUMNS else 1
            if module.bias is not None and style == COLUMNS:
                dims[f"{name}.bias"] = 0
            num = module.out_features if style == COLUMNS else module.in_features
            if num % tp:
                raise ValueError(f"{SETTING} = {tp} does not divide the {num} features of {name}; {_fix(num)}")
        else:
            raise ValueError(f"{SETTING} = {tp}: {name} is cut as {style}, which limes does not serve; set it to 1")
    if not dims:
        raise ValueError(f"{SETTING} = {tp}: {model.config.model_type} has no plan for it in transformers; set it to 1")
    return TensorPlan(dims | _vocabulary(model), frozenset(partial), _has_plain_vocabulary(model))


def check_divides(model: PreTrainedModel, tp: int) -> None:
    """Both kinds of heads can be dealt out.

    Raises:
        ValueError: they cannot; says the numbers.
    """
    settings = model.config.get_text_config()
    heads = settings.num_attention_heads
    counts = {"attention heads": heads, "key-value heads": getattr(settings, "num_key_value_heads", None) or heads}
    for what, num in counts.items():
        if num % tp:
            raise ValueError(f"{SETTING} = {tp} does not divide the {num} {what} of the model; {_fix(num)}")


def _fix(num: int) -> str:
    able = [n for n in range(1, min(num, 64) + 1) if num % n == 0]
    return f"use one of {', '.join(map(str, able))}"


def _vocabulary(model: PreTrainedModel) -> dict[str, int]:
    if not _has_plain_vocabulary(model):
        return {}
    wanted = [model.get_input_embeddings(), model.get_output_embeddings()]
    return {f"{name}.weight": 0 for name, module in model.named_modules() if any(module is other for other in wanted)}


def _has_plain_vocabulary(model: PreTrainedModel) -> bool:
    """An embedding that scales, or a subclass of any kind, stays whole, and the LM head with it."""
    return type(model.get_input_embeddings()) is nn.Embedding


def slice_of(full: Tensor, dim: int | None, rank: int, tp: int) -> Tensor:
    """One rank's slice of a whole tensor, a view."""
    if dim is None:
        return full
    start, end = slice_bounds(full.shape[dim], rank, tp)
    return full.narrow(dim, start, end - start)


def slice_bounds(num: int, rank: int, tp: int) -> tuple[int, int]:
    """First and one past the last of `num` that are a rank's; vocabularies need not divide."""
    size = -(-num // tp)
    return min(rank * size, num), min((rank + 1) * size, num)


def use_tensor_parallel(model: PreTrainedModel, plan: TensorPlan, group: dist.ProcessGroup) -> None:
    """Make the modules of a model compute with their slices, in place; parameters are cut by the caller."""
    rank, tp = dist.get_rank(group), dist.get_world_size(group)
    inputs: dict[str, SharedInput] = {}
    for name, module in model.named_modules():
        dim = plan.dims.get(f"{name}.weight")
        if dim is None or module is model.get_output_embeddings():
            continue
        if isinstance(module, nn.Embedding):
            module.__class__ = VocabEmbedding
            module.first_row = slice_bounds(module.num_embeddings, rank, tp)[0]  # type: ignore[assignment]
        elif dim == 0:
            module.__class__ = ColumnLinear
            shared = inputs.setdefault(name.rpartition(".")[0], SharedInput(group))
            shared.num_layers += 1
            module.tp_input = shared
        else:
            module.__class__ = RowLinear
        module.tp_group = group


@torch.no_grad()
def add_up(grads: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sum gradients of which each rank has a part, in place."""
    for grad in grads:
        dist.all_reduce(grad, group=group)
