"""Collectives that gradients flow through."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def copy_to(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x`, which is the same on all ranks and of which each uses a part: its gradients add up."""
    return _CopyTo.apply(x, group)


def reduce_from(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of all ranks' `x`, which each rank goes on with in the same way."""
    return _ReduceFrom.apply(x, group)


def gather_shared(x: Tensor, room: int, group: dist.ProcessGroup) -> Tensor:
    """All ranks' `x`, of up to `room` rows each, as `[size * room, ...]`; each rank uses the whole in a way of its own.

    Backward, the gradients of all ranks add up. Rows behind a rank's own are zeros.
    """
    return _GatherShared.apply(x, room, group)


def gather_same(x: Tensor, room: int, group: dist.ProcessGroup) -> Tensor:
    """As `gather_shared`, where every rank uses the whole in the same way: backward, each keeps its own gradient."""
    return _GatherSame.apply(x, room, group)


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _GatherShared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, room: int, group: dist.ProcessGroup) -> Tensor:
        ctx.num, ctx.room, ctx.group, ctx.dtype = len(x), room, group, x.dtype
        return _gathered(x, room, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        wide = torch.promote_types(ctx.dtype, torch.float32)  # sums over ranks do not round to short types
        grad = grads[0].to(wide).contiguous()
        own = grad.new_empty(ctx.room, *grad.shape[1:])
        reduce_scatter(own, grad, ctx.group)
        return own[: ctx.num].to(ctx.dtype), None, None


class _GatherSame(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, room: int, group: dist.ProcessGroup) -> Tensor:
        ctx.start = dist.get_rank(group) * room
        ctx.num = len(x)
        return _gathered(x, room, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.start : ctx.start + ctx.num], None, None


def _gathered(x: Tensor, room: int, group: dist.ProcessGroup) -> Tensor:
    own = x.new_zeros(room, *x.shape[1:])
    own[: len(x)] = x
    whole = own.new_empty(dist.get_world_size(group) * room, *x.shape[1:])
    all_gather(whole, own, group)
    return whole


def all_gather(whole: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `whole` with the ranks' `own`, end to end along the first dimension."""
    # newer releases of torch rename both, and warn of the old names
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(whole, own, group=group)


def reduce_scatter(own: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `own` with this rank's rows of the sum of the ranks' `whole`."""
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(own, whole, group=group)
