"""From rewards to advantages: how much better an answer was than expected.

`group_relative` and `leave_one_out` take every sample of the rollout, whatever rank will train on it, because a group
may lie on several ranks. Further estimators: `limes.algorithms.returns.gae` and `limes.algorithms.stepwise.step_wise`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from limes.algorithms import whitening
from limes.algorithms.choices import choose
from limes.algorithms.groups import GroupStatistics, Ids, Rewards, Valid, group_statistics, reward_dtype, scored
from limes.algorithms.packed import Lengths, repeat_per_token, select, trained_lengths
from limes.algorithms.returns import discounted_returns, gae, shaped_rewards
from limes.algorithms.whitening import whiten

__all__ = [
    "gae",
    "group_relative",
    "leave_one_out",
    "per_token",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "whiten",
]


def group_relative(
    rewards: Rewards,
    group_ids: Ids,
    *,
    std: str = "sample",
    eps: float = 1e-6,
    valid: Valid = None,
    singletons: str = "zero",
) -> Tensor:
    """Reward less the group's mean, divided by the group's spread + eps.

    GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2); with `std="none"` Dr.GRPO (Liu et al. 2025,
    arXiv:2503.20783).

    Args:
        rewards: `[num_samples]`, a tensor or numbers; None and NaN are unscored, hence invalid.
        group_ids: `[num_samples]` integer ids, in any order; groups may differ in size.
        std: `sample` divides squares by n - 1, `population` by n, `none` leaves the centred reward (eps is not used).
        eps: added to the spread.
        valid: `[num_samples]`, false for samples outside every statistic; None for all.
        singletons: what a group with one valid sample gets: `zero` with a warning, `zero_quietly`, `raw` its reward,
            `error` a refusal.

    Returns:
        `[num_samples]`, in the dtype of a float tensor, else float64; statistics run in float64. Invalid samples and
        groups of equal rewards get exact zeros; equality decides, not a small spread.

    Raises:
        ValueError: unknown `std` or `singletons`, lengths that differ, an infinite reward, a refused singleton.
    """
    spread = choose(_SPREADS, std, "std")
    stats = group_statistics(rewards, group_ids, valid)
    return _treat_singletons(stats.centred / spread(stats, eps), stats, singletons).to(reward_dtype(rewards))


def leave_one_out(rewards: Rewards, group_ids: Ids, *, valid: Valid = None, singletons: str = "zero") -> Tensor:
    """Reward less the mean of the group's other valid samples, which is n / (n - 1) times the centred reward.

    RLOO (Ahmadian et al. 2024, arXiv:2402.14740). Arguments, returns and errors as in `group_relative`.
    """
    stats = group_statistics(rewards, group_ids, valid)
    scale = stats.count / (stats.count - 1).clamp(min=1)
    return _treat_singletons(stats.centred * scale, stats, singletons).to(reward_dtype(rewards))


def reinforce_plus_plus(
    rewards: Rewards,
    kl: Tensor | None,
    lengths: Lengths,
    mask: Tensor,
    *,
    kl_coef: float,
    gamma: float,
    whiten: bool = True,
    unbiased: bool = True,
    valid: Valid = None,
) -> Tensor:
    """Discounted returns of reward - kl_coef * KL, whitened over all tokens of the batch.

    REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): A_t = R - kl_coef * (sum of the KL from t on), for gamma 1.

    Args:
        rewards: `[num_samples]`, a tensor or numbers; None and NaN are unscored, hence invalid.
        kl: `[num_tokens]` per-token KL estimates to the reference; None is zeros.
        lengths: tokens of each sample.
        mask: `[num_tokens]`, not 0 on trained tokens.
        kl_coef: weight of the KL in the reward.
        gamma: discount per trained token.
        whiten: subtract the mean and divide by the spread over the masked-in tokens of this call; False leaves that to
            the caller, who has the moments of other ranks.
        unbiased: spread with n - 1 instead of n.
        valid: `[num_samples]`, false for samples whose tokens are outside the statistics and get 0.

    Returns:
        `[num_tokens]` in the dtype of `rewards` (float64 for numbers), detached, 0 under the mask.
    """
    values, counts_in = scored(rewards, valid)
    mask = _mask_valid(mask, counts_in, lengths)
    token_rewards = shaped_rewards(values.to(mask.device), kl, lengths, mask, kl_coef=kl_coef)
    returns = discounted_returns(token_rewards, lengths, mask, gamma=gamma)
    return _whiten_if(whiten, returns, mask, unbiased).to(reward_dtype(rewards))


def reinforce_plus_plus_baseline(
    rewards: Rewards,
    group_ids: Ids,
    lengths: Lengths,
    mask: Tensor,
    *,
    whiten: bool = True,
    unbiased: bool = True,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    valid: Valid = None,
    singletons: str = "zero",
) -> Tensor:
    """Reward less the group's mean on every token, whitened over all tokens of the batch.

    REINFORCE++-baseline (Hu et al. 2025, arXiv:2501.03262). The spread is that of the whole batch, so a group of small
    differences is not blown up. Each token counts once in the statistics: longer samples weigh more.

    Args:
        rewards, group_ids, valid, singletons: as in `group_relative`; samples without a masked-in token are invalid.
        lengths, mask, whiten, unbiased: as in `reinforce_plus_plus`.
        kl: `[num_tokens]` per-token KL estimates, subtracted from the tokens times `kl_coef` before whitening.
        kl_coef: weight of the KL.

    Returns:
        `[num_tokens]` in the dtype of `rewards` (float64 for numbers), detached, 0 under the mask.
    """
    values, counts_in = scored(rewards, valid)
    counts_in = counts_in & (trained_lengths(mask, lengths) > 0).to(counts_in.device)
    mask = _mask_valid(mask, counts_in, lengths)
    centred = group_relative(values, group_ids, std="none", valid=counts_in, singletons=singletons)
    tokens = per_token(centred.to(mask.device), lengths, mask)
    if kl is not None:
        tokens = tokens - select(kl.detach().double() * kl_coef, mask)
    return _whiten_if(whiten, tokens, mask, unbiased).to(reward_dtype(rewards))


def per_token(per_sample: Tensor, lengths: Lengths, mask: Tensor) -> Tensor:
    """Give each masked-in token the value of its sample and every other token 0.

    Args:
        per_sample: `[num_samples]`, any float dtype.
        lengths: tokens of each sample.
        mask: `[num_tokens]`, not 0 on trained tokens.
    """
    return select(repeat_per_token(per_sample, lengths, mask.numel()), mask)


def _whiten_if(wanted: bool, values: Tensor, mask: Tensor, unbiased: bool) -> Tensor:
    return whitening.whiten(values, mask, unbiased=unbiased) if wanted else values


def _mask_valid(mask: Tensor, valid: Tensor, lengths: Lengths) -> Tensor:
    return (mask != 0) & repeat_per_token(valid.to(mask.device), lengths, mask.numel())


def _sample_spread(stats: GroupStatistics, eps: float) -> Tensor:
    return (stats.squares / (stats.count - 1).clamp(min=1)).sqrt() + eps


def _population_spread(stats: GroupStatistics, eps: float) -> Tensor:
    return (stats.squares / stats.count.clamp(min=1)).sqrt() + eps


def _no_spread(stats: GroupStatistics, _eps: float) -> Tensor:
    return torch.ones_like(stats.squares)


_SPREADS: Mapping[str, Callable[[GroupStatistics, float], Tensor]] = MappingProxyType(
    {"sample": _sample_spread, "population": _population_spread, "none": _no_spread}
)


def _treat_singletons(advantages: Tensor, stats: GroupStatistics, singletons: str) -> Tensor:
    treat = choose(_SINGLETONS, singletons, "singletons")
    alone = stats.valid & (stats.count == 1)
    advantages = torch.where(stats.equal, 0.0, advantages)
    return treat(advantages, stats, alone) if bool(alone.any()) else advantages


def _zero_with_warning(advantages: Tensor, _stats: GroupStatistics, alone: Tensor) -> Tensor:
    message = f"{int(alone.sum())} groups have one valid sample: nothing to compare it with, so its advantage is 0"
    warnings.warn(message, stacklevel=4)
    return advantages


def _zero(advantages: Tensor, _stats: GroupStatistics, _alone: Tensor) -> Tensor:
    return advantages


def _raw_reward(advantages: Tensor, stats: GroupStatistics, alone: Tensor) -> Tensor:
    return torch.where(alone, stats.rewards, advantages)


def _refuse(_advantages: Tensor, _stats: GroupStatistics, alone: Tensor) -> Tensor:
    raise ValueError(
        f"{int(alone.sum())} groups have one valid sample and a group baseline needs two: raise "
        "n_samples_per_prompt, or choose singletons='zero' or 'raw'"
    )


_SINGLETONS: Mapping[str, Callable[[Tensor, GroupStatistics, Tensor], Tensor]] = MappingProxyType(
    {"zero": _zero_with_warning, "zero_quietly": _zero, "raw": _raw_reward, "error": _refuse}
)
