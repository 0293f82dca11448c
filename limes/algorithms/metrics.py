"""Metrics, and how their parts add up.

The convention of this room: a loss or correction returns `dict[str, Tensor]`, each a detached `[num_tokens]` tensor.
The name declares the reduction: a name that ends in `_max` is reduced by the maximum, every other by the mean over
masked-in tokens. `reduce_tokens` turns one part's tensors into a `Part` each; parts of a step, from micro-batches and
ranks, `merge` into the whole without depending on the cut, because a mean travels as (sum, count).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from limes.algorithms.groups import Ids, Rewards, Valid, group_statistics
from limes.algorithms.packed import check_packed, select

MAX_SUFFIX = "_max"


@dataclass(frozen=True)
class Part:
    """What one part of a step contributes to a metric.

    Attributes:
        value: float64 scalar: the sum over tokens, or their maximum (-inf for none).
        count: float64 scalar: how many tokens.
        is_max: whether `value` is a maximum.
    """

    value: Tensor
    count: Tensor
    is_max: bool

    def __add__(self, other: Part) -> Part:
        assert self.is_max == other.is_max, "one metric, one reduction"
        value = torch.maximum(self.value, other.value) if self.is_max else self.value + other.value
        return Part(value, self.count + other.count, self.is_max)

    @property
    def result(self) -> float | None:
        """The mean or maximum; None over no tokens."""
        count = float(self.count)
        if count == 0:
            return None
        return float(self.value) if self.is_max else float(self.value) / count


def reduce_tokens(metrics: Mapping[str, Tensor], mask: Tensor) -> dict[str, Part]:
    """One `Part` a metric over the masked-in tokens of this call.

    Args:
        metrics: per-token values, `[num_tokens]` each.
        mask: `[num_tokens]`, not 0 on trained tokens; nothing else is read.
    """
    count = (mask != 0).double().sum()
    parts = {}
    for name, values in metrics.items():
        check_packed(mask=mask, **{name: values})
        is_max = name.endswith(MAX_SUFFIX)
        selected = select(values.detach().double(), mask, float("-inf") if is_max else 0.0)
        nothing = selected.new_tensor(float("-inf"))
        value = torch.cat([selected, nothing[None]]).max() if is_max else selected.sum()
        parts[name] = Part(value, count, is_max)
    return parts


def merge(parts: Iterable[Mapping[str, Part]]) -> dict[str, Part]:
    """Put parts of a step together; a part may lack a metric."""
    whole: dict[str, Part] = {}
    for part in parts:
        for name, value in part.items():
            whole[name] = whole[name] + value if name in whole else value
    return whole


def quantile(values: Tensor, mask: Tensor, q: float) -> float | None:
    """The q-quantile of the masked-in values, by linear interpolation; None over none.

    Quantiles of parts do not merge: collect the values of the whole step first.
    """
    chosen = values.detach().double()[mask != 0].sort().values
    if not chosen.numel():
        return None
    place = q * (chosen.numel() - 1)
    low = math.floor(place)
    high = min(low + 1, chosen.numel() - 1)
    return float(chosen[low] + (place - low) * (chosen[high] - chosen[low]))


def weight_sums(weights: Tensor, mask: Tensor) -> Tensor:
    """(count, sum w, sum w^2) of masked-in importance weights, float64 `[3]`; add those of parts, then see below."""
    check_packed(weights=weights, mask=mask)
    chosen = select(weights.detach().double(), mask)
    return torch.stack([(mask != 0).double().sum(), chosen.sum(), (chosen**2).sum()])


def effective_sample_size(sums: Tensor) -> float | None:
    """(sum w)^2 / (n sum w^2) from `weight_sums`: the share of tokens that count, 0 .. 1 (Kish 1965); None for none."""
    count, total, squares = (float(x) for x in sums)
    return total**2 / (count * squares) if squares > 0 else None


def zero_variance_groups(rewards: Rewards, group_ids: Ids, valid: Valid = None) -> tuple[int, int]:
    """How many groups have valid rewards that are all the same number, and how many groups have a valid reward at all.

    Such groups move no policy. Equality decides. A group of one counts as equal. Arguments as in `group_relative`.
    """
    stats = group_statistics(rewards, group_ids, valid)
    scored_groups = stats.group[stats.valid].unique().numel()
    equal_groups = stats.group[stats.valid & stats.equal].unique().numel()
    return equal_groups, scored_groups


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k answers, drawn without replacement from n of which c are right, is right.

    1 - C(n - c, k) / C(n, k): unbiased (Chen et al. 2021, arXiv:2107.03374, eq. 1).

    Raises:
        ValueError: not 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@k with n={n}, c={c}, k={k}: needs 1 <= k <= n and 0 <= c <= n")
    return 1 - math.comb(n - c, k) / math.comb(n, k)
