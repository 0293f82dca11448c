"""Whitening: values less their mean, divided by their spread, over all masked-in positions of an optimizer step.

The moments of parts of a step merge into those of the whole, so ranks that hold different tokens whiten alike:
`whiten(values, mask, moments=merge_moments([measure(values, mask), *those_of_other_ranks]))`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from limes.algorithms.packed import select


@dataclass(frozen=True)
class Moments:
    """Float64 scalars that say all that whitening needs of a set of values.

    Attributes:
        count: how many values.
        mean: their mean, 0 for none.
        squares: sum of squared distances to the mean.
        low: the smallest, +inf for none.
        high: the largest, -inf for none.
    """

    count: Tensor
    mean: Tensor
    squares: Tensor
    low: Tensor
    high: Tensor

    def pack(self) -> Tensor:
        """The five scalars as one float64 tensor, to send to other ranks."""
        return torch.stack([self.count, self.mean, self.squares, self.low, self.high])

    @classmethod
    def unpack(cls, packed: Tensor) -> Moments:
        """The inverse of `pack`."""
        return cls(*packed.unbind())


def measure(values: Tensor, mask: Tensor) -> Moments:
    """Moments of the masked-in values, two tensors of one shape; sums run in float64.

    Raises:
        ValueError: the shapes differ.
    """
    if values.shape != mask.shape:
        raise ValueError(f"values of shape {list(values.shape)} came with a mask of shape {list(mask.shape)}")
    wide = select(values.detach().double(), mask)
    count = (mask != 0).double().sum()
    mean = wide.sum() / count.clamp(min=1)
    squares = select((wide - mean) ** 2, mask).sum()
    infinity = wide.new_full((1,), float("inf"))
    low = torch.cat([select(wide, mask, float("inf")).flatten(), infinity]).min()
    high = torch.cat([select(wide, mask, float("-inf")).flatten(), -infinity]).max()
    return Moments(count, mean, squares, low, high)


def merge_moments(parts: Iterable[Moments]) -> Moments:
    """Moments of the union of disjoint parts (Chan, Golub, LeVeque 1979)."""
    table = torch.stack([part.pack() for part in parts])
    count, mean, squares = table[:, 0], table[:, 1], table[:, 2]
    total = count.sum()
    whole_mean = (count * mean).sum() / total.clamp(min=1)
    whole_squares = (squares + count * (mean - whole_mean) ** 2).sum()
    return Moments(total, whole_mean, whole_squares, table[:, 3].min(), table[:, 4].max())


def whiten(
    values: Tensor,
    mask: Tensor,
    *,
    unbiased: bool = True,
    eps: float = 1e-8,
    shift_mean: bool = True,
    moments: Moments | None = None,
) -> Tensor:
    """Masked-in values with mean 0 and variance 1.

    Args:
        values: any shape and float dtype; statistics run in float64.
        mask: the same shape, not 0 on values that count. What stands elsewhere is never read.
        unbiased: divide squares by n - 1 instead of n.
        eps: floor of the variance. Nothing is added to larger ones.
        shift_mean: subtract the mean; False only rescales.
        moments: those of the whole step where `values` are a part of it.

    Returns:
        The shape and dtype of `values`, detached, 0 under the mask. Values that are all equal give exact zeros
        (with `shift_mean`).
    """
    known = moments if moments is not None else measure(values, mask)
    variance = known.squares / (known.count - float(unbiased)).clamp(min=1)
    wide = select(values.detach().double(), mask)
    shifted = torch.where(known.low < known.high, wide - known.mean, 0.0) if shift_mean else wide
    return select(shifted * variance.clamp(min=eps).rsqrt(), mask).to(values.dtype)
