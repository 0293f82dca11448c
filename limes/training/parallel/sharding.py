"""A model on many ranks: cut by heads, then by rows, each layer as it is read, so that no rank ever holds all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from limes.training.parallel.boxes import Box
from limes.training.parallel.collectives import all_gather
from limes.training.parallel.tensor import (
    TensorPlan,
    plan_tensor_parallel,
    slice_bounds,
    slice_of,
    use_tensor_parallel,
)
from limes.training.ranks import Ranks


@dataclass(frozen=True)
class Piece:
    """This rank's part of a parameter.

    Attributes:
        name: of the parameter.
        parameter: the sharded one, whose local tensor is this part.
        shape: of the whole.
        tp_dim: dimension along which it is cut by heads, columns or vocabulary.
        partial: its gradient is still to be added up over the ranks that share heads.
    """

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    tp_dim: int | None
    partial: bool

    @property
    def local(self) -> Tensor:
        """The part itself; writing to it writes to the parameter."""
        return local_of(self.parameter.detach())

    def box(self, ranks: Ranks) -> Box:
        """Where it lies in the whole."""
        return box_of(self.shape, self.tp_dim, ranks.shard_rank, ranks.tp_rank, ranks)


def box_of(shape: Sequence[int], tp_dim: int | None, shard_rank: int, tp_rank: int, ranks: Ranks) -> Box:
    """Where the part of one rank lies: sliced along `tp_dim`, then cut into equal runs of rows."""
    bounds = [(0, num) for num in shape]
    if tp_dim is not None:
        bounds[tp_dim] = slice_bounds(shape[tp_dim], tp_rank, ranks.layout.tp)
    first, last = bounds[0]
    start, end = slice_bounds(last - first, shard_rank, ranks.layout.dp_shard * ranks.layout.cp)
    bounds[0] = (first + start, first + end)
    return Box(tuple(bounds))


def local_of(tensor: Tensor) -> Tensor:
    """The own part of a sharded tensor; any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass
class ShardedModel:
    """A network whose parameters are spread over ranks.

    Attributes:
        network: what to call; all ranks call it together.
        pieces: in the order of the network's parameters, each tensor once.
        ranks: that hold it.
        dtype: of the forward pass, and of weights that leave this model.
    """

    network: nn.Module
    pieces: list[Piece]
    ranks: Ranks
    dtype: torch.dtype


def reshard(network: nn.Module) -> None:
    """Let go of what a forward pass without a backward pass has gathered, which would not follow the parts.

    Whoever makes such passes does this after the last of them, so that parts can be written to at any other time.
    """
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def shard(
    network: nn.Module,
    model: PreTrainedModel,
    ranks: Ranks,
    *,
    dtype: torch.dtype,
    apart: Sequence[nn.Module] = (),
    prefix: str = "",
    trainable: bool = True,
    filled: bool = True,
) -> ShardedModel:
    """Spread a network over ranks, in place; all ranks make this call.

    Parameters may be on `meta` everywhere but on rank 0, which then hands them out. What trains is kept in float32 at
    least, what does not in `dtype`; the forward pass runs in `dtype` and gradients are summed in float32 at least.

    Args:
        network: has the one forward pass that is used.
        model: the transformers model in it.
        apart: modules of the network that run in the type of their own parameters.
        prefix: of the network's parameter names, which is left out of the pieces' names.
        filled: hand out what is on `meta` somewhere; else it becomes memory that the caller fills.

    Raises:
        ValueError: the model cannot be cut by so many.
    """
    plan = plan_tensor_parallel(model, ranks.layout.tp)
    if ranks.layout.tp > 1:
        use_tensor_parallel(model, plan, ranks.tp_group)
    inner = next(name for name, module in network.named_modules() if module is model)
    spread = _Spread(network, ranks, _within(plan, f"{inner}."), _kept_type(dtype, trainable), filled)
    mesh = ranks.shard_mesh
    wide = torch.promote_types(dtype, torch.float32)
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide)
    policy = mixed if trainable and wide != dtype else MixedPrecisionPolicy()
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in layers:
        spread.take(module)
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in apart:
        spread.take(module)
        fully_shard(module, mesh=mesh)
    spread.take(network)
    fully_shard(network, mesh=mesh, mp_policy=policy)
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # losses have their denominator already
            module.set_force_sum_reduction_for_comms(True)
    pieces = [
        Piece(name.removeprefix(prefix), parameter, *spread.known[name])
        for name, parameter in network.named_parameters()
    ]
    return ShardedModel(network, pieces, ranks, dtype)


def _kept_type(dtype: torch.dtype, trainable: bool) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if trainable else dtype


def _within(plan: TensorPlan, prefix: str) -> TensorPlan:
    """The plan by names within the network."""
    dims = {prefix + name: dim for name, dim in plan.dims.items()}
    return TensorPlan(dims, frozenset(prefix + name for name in plan.partial), plan.vocab_head)


class _Spread:
    """Gives each rank its slice of parameters, module by module, and everyone rank 0's buffers."""

    def __init__(self, network: nn.Module, ranks: Ranks, plan: TensorPlan, kept: torch.dtype, filled: bool) -> None:
        self._ranks, self._plan, self._kept = ranks, plan, kept
        self._names: dict[int, str] = {}
        for name, parameter in network.named_parameters():
            self._names.setdefault(id(parameter), name)
        self._handed_out = filled and ranks.any(any(p.is_meta for p in network.parameters()))
        self._new: dict[int, nn.Parameter] = {}
        self._old: list[nn.Parameter] = []
        self.known: dict[str, tuple[tuple[int, ...], int | None, bool]] = {}

    def take(self, root: nn.Module) -> None:
        for module in root.modules():
            for own, parameter in list(module.named_parameters(recurse=False)):
                if not isinstance(parameter, DTensor):
                    module.register_parameter(own, self._sliced(parameter))
            for own, buffer in list(module.named_buffers(recurse=False)):
                module._buffers[own] = self._whole(buffer)

    def _sliced(self, parameter: nn.Parameter) -> nn.Parameter:
        """The new parameter; a tied one is the same object again."""
        name = self._names.get(id(parameter))
        if name is None:
            return parameter
        if id(parameter) not in self._new:
            dim = self._plan.dims.get(name)
            self.known[name] = (tuple(parameter.shape), dim, name in self._plan.partial)
            whole = self._whole(parameter.detach())
            own = slice_of(whole, dim, self._ranks.tp_rank, self._ranks.layout.tp)
            wide = torch.promote_types(own.dtype, self._kept)  # a float32 head of a bfloat16 model stays what it is
            kept = own.to(wide if wide != own.dtype else own.dtype, copy=dim is not None)
            self._new[id(parameter)] = nn.Parameter(kept.contiguous(), requires_grad=parameter.requires_grad)
            self._old.append(parameter)  # its id stays taken
        return self._new[id(parameter)]

    def _whole(self, tensor: Tensor) -> Tensor:
        """The whole tensor on this rank's device."""
        device = self._ranks.device
        here = torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if tensor.is_meta else tensor.to(device)
        return self._ranks.broadcast(here.contiguous()) if self._handed_out else here


@torch.no_grad()
def whole_tensors(
    model: ShardedModel, *, dtype: torch.dtype | None, bucket_bytes: int = 1 << 27
) -> Iterator[tuple[str, Tensor]]:
    """The parameters one after the other, whole and in `dtype`, on every rank; gathered a bucket at a time.

    Every rank has to go through all of them.

    Args:
        dtype: None for the type that they are kept in.
        bucket_bytes: of whole parameters; one that is larger goes alone.
    """
    for bucket in _buckets(model.pieces, bucket_bytes, dtype):
        yield from _gathered(bucket, model.ranks, dtype)


def _buckets(pieces: Sequence[Piece], bucket_bytes: int, dtype: torch.dtype | None) -> Iterator[list[Piece]]:
    bucket: list[Piece] = []
    room = bucket_bytes
    for piece in pieces:
        size = torch.Size(piece.shape).numel() * (dtype or piece.parameter.dtype).itemsize
        if bucket and (size > room or bucket[0].parameter.dtype != piece.parameter.dtype):
            yield bucket
            bucket, room = [], bucket_bytes
        bucket.append(piece)
        room -= size
    if bucket:
        yield bucket


def _gathered(bucket: Sequence[Piece], ranks: Ranks, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """One collective: every rank sends its parts, each with as many elements as the largest of them has."""
    if ranks.is_alone:
        for piece in bucket:
            yield piece.name, piece.local if dtype is None else piece.local.to(dtype)
        return
    shards, tp = ranks.layout.dp_shard * ranks.layout.cp, ranks.layout.tp
    rooms = [max(box.num for _, box in _boxes(piece, ranks)) for piece in bucket]
    own = torch.zeros(sum(rooms), dtype=dtype or bucket[0].parameter.dtype, device=ranks.device)
    for piece, part in zip(bucket, own.split(rooms), strict=True):
        part[: piece.local.numel()] = piece.local.flatten()
    table = own.new_empty(shards * tp, len(own))
    all_gather(table.view(-1), own, ranks.replica_group)
    for piece, parts in zip(bucket, table.split(rooms, dim=1), strict=True):
        whole = own.new_empty(piece.shape)
        for place, box in _boxes(piece, ranks):
            box.within(whole).copy_(parts[place][: box.num].view(box.shape))
        yield piece.name, whole


def _boxes(piece: Piece, ranks: Ranks) -> Iterator[tuple[int, Box]]:
    """The parts that make up the whole: place in the copy's group, and where the part lies."""
    shards, tp = ranks.layout.dp_shard * ranks.layout.cp, ranks.layout.tp
    for shard_rank in range(shards):
        for tp_rank in range(tp if piece.tp_dim is not None else 1):
            yield shard_rank * tp + tp_rank, box_of(piece.shape, piece.tp_dim, shard_rank, tp_rank, ranks)
