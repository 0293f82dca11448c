"""Statistics of the rewards of a group: the answers to one prompt.

Membership is the explicit id, in any order and of any size. Sums run in float64 and in the order of the sorted rewards,
so that shuffling the samples changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Rewards = Tensor | Sequence[float | None]
Ids = Tensor | Sequence[int]
Valid = Tensor | Sequence[bool] | None


@dataclass(frozen=True)
class GroupStatistics:
    """What each sample's group looks like; every tensor is `[num_samples]` and float64 unless said otherwise.

    Attributes:
        rewards: the sample's own reward, 0 where invalid.
        valid: bool, the sample is scored and counts.
        count: valid samples of its group.
        mean: mean reward of its group.
        squares: sum of squared distances to that mean.
        equal: bool, all valid rewards of its group are the same number.
        group: int64, dense number of its group.
    """

    rewards: Tensor
    valid: Tensor
    count: Tensor
    mean: Tensor
    squares: Tensor
    equal: Tensor
    group: Tensor

    @property
    def centred(self) -> Tensor:
        """Reward less the group's mean; exactly 0 where all are equal and where the sample is invalid."""
        return torch.where(self.valid & ~self.equal, self.rewards - self.mean, 0.0)


def group_statistics(rewards: Rewards, group_ids: Ids, valid: Valid = None) -> GroupStatistics:
    """Statistics of each sample's group over the group's valid samples.

    Args:
        rewards: `[num_samples]`, a tensor or numbers. None and NaN say that a sample is unscored, hence invalid.
        group_ids: `[num_samples]` integer ids.
        valid: `[num_samples]`, false for samples outside every statistic (failed, fully masked); None for all.

    Raises:
        ValueError: lengths differ, or a valid reward is infinite.
    """
    values, counts_in = scored(rewards, valid)
    ids = torch.as_tensor(group_ids, device=values.device)
    if ids.shape != values.shape:
        raise ValueError(f"{values.numel()} rewards came with {ids.numel()} group ids")
    _, group = torch.unique(ids, return_inverse=True)
    num_groups = int(group.max()) + 1 if group.numel() else 0
    order = torch.argsort(values)
    order = order[torch.argsort(group[order], stable=True)]

    def group_sums(of: Tensor) -> Tensor:
        return values.new_zeros(num_groups).index_add(0, group[order], of[order])

    count = group_sums(counts_in.double())
    mean = group_sums(values) / count.clamp(min=1)
    squares = group_sums(torch.where(counts_in, values - mean[group], 0.0) ** 2)
    lowest = _extreme(values, counts_in, group, num_groups, "amin", float("inf"))
    highest = _extreme(values, counts_in, group, num_groups, "amax", float("-inf"))
    equal = lowest >= highest
    return GroupStatistics(values, counts_in, count[group], mean[group], squares[group], equal[group], group)


def scored(rewards: Rewards, valid: Valid) -> tuple[Tensor, Tensor]:
    """Rewards in float64 `[num_samples]`, 0 where unscored or invalid, and which of them count.

    Raises:
        ValueError: not 1-D and equally long, or a valid reward is infinite.
    """
    if not isinstance(rewards, Tensor):
        rewards = torch.tensor([float("nan") if r is None else float(r) for r in rewards], dtype=torch.float64)
    values = rewards.detach().double()
    chosen = torch.ones_like(values, dtype=torch.bool) if valid is None else torch.as_tensor(valid) != 0
    if values.dim() != 1 or chosen.shape != values.shape:
        raise ValueError(
            f"rewards and valid must be 1-D and equally long, got {list(values.shape)} and {list(chosen.shape)}"
        )
    counts_in = chosen.to(values.device) & ~values.isnan()
    if bool((values.isinf() & counts_in).any()):
        raise ValueError("a valid sample has an infinite reward; clip it in the reward function or mark it invalid")
    return torch.where(counts_in, values, 0.0), counts_in


def _extreme(values: Tensor, valid: Tensor, group: Tensor, num_groups: int, which: str, start: float) -> Tensor:
    return values.new_full((num_groups,), start).scatter_reduce(0, group, torch.where(valid, values, start), which)


def reward_dtype(rewards: Rewards) -> torch.dtype:
    """Dtype of what is returned for these rewards: a float tensor's own, float64 for numbers and integers."""
    return rewards.dtype if isinstance(rewards, Tensor) and rewards.is_floating_point() else torch.float64
