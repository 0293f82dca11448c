"""Returns and generalised advantage estimates over packed sequences.

Only masked-in tokens exist here: a sequence is treated as if the others had been cut out. Tool output between two
sampled tokens therefore neither discounts nor bootstraps anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from limes.algorithms.packed import Lengths, check_packed, repeat_per_token, select, trained_lengths


def gae(
    token_rewards: Tensor, values: Tensor, lengths: Lengths, mask: Tensor, *, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438, eq. 16).

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lambd A_{t+1}, where t + 1 is the next masked-in token
    of the sequence and everything after the last one is 0.

    Args:
        token_rewards: `[num_tokens]`; a sequence's outcome belongs on its last masked-in token (`shaped_rewards`).
        values: `[num_tokens]` critic's values.
        lengths: tokens of each sequence.
        mask: `[num_tokens]`, not 0 on trained tokens.
        gamma: discount per trained token.
        lambd: 0 trusts the critic, 1 the rewards.

    Returns:
        Advantages and returns (advantages + values), `[num_tokens]`, detached, in the dtype of `values`, 0 under the
        mask. Sums run in float64.
    """
    check_packed(token_rewards=token_rewards, values=values, mask=mask)
    index, lengths = _compress(lengths, mask)
    value = values.detach().double()[index]
    left = tokens_left(lengths, index.numel())
    next_value = torch.where(left > 0, value.roll(-1), 0.0)
    delta = token_rewards.detach().double()[index] + gamma * next_value - value
    advantage = discounted_suffix_sums(delta, left, gamma * lambd)
    return _expand(advantage, index, values), _expand(advantage + value, index, values)


def discounted_returns(token_rewards: Tensor, lengths: Lengths, mask: Tensor, *, gamma: float) -> Tensor:
    """Return of each token, G_t = r_t + gamma G_{t+1} over masked-in tokens; shapes and dtypes as in `gae`."""
    check_packed(token_rewards=token_rewards, mask=mask)
    index, lengths = _compress(lengths, mask)
    rewards = token_rewards.detach().double()[index]
    return _expand(discounted_suffix_sums(rewards, tokens_left(lengths, index.numel()), gamma), index, token_rewards)


def shaped_rewards(rewards: Tensor, kl: Tensor | None, lengths: Lengths, mask: Tensor, *, kl_coef: float) -> Tensor:
    """Token rewards: -kl_coef * kl on every masked-in token, plus the sequence's reward on its last masked-in one.

    Args:
        rewards: `[num_sequences]` outcome of each sequence.
        kl: `[num_tokens]` per-token KL estimates; None is zeros.
        lengths: tokens of each sequence.
        mask: `[num_tokens]`, not 0 on trained tokens.
        kl_coef: weight of the penalty.

    Returns:
        `[num_tokens]`, detached, in the dtype of `rewards`, 0 under the mask. The inputs are left as they were. A
        sequence without masked-in tokens has nowhere to put its reward, and loses it.
    """
    num_tokens = mask.numel()
    index, kept = _compress(lengths, mask)
    shaped = torch.zeros(num_tokens, dtype=rewards.dtype, device=rewards.device)
    if kl is not None:
        check_packed(kl=kl, mask=mask)
        shaped = select(kl.detach().to(rewards.dtype) * -kl_coef, mask)
    is_last = tokens_left(kept, index.numel()) == 0
    outcome = repeat_per_token(rewards.detach(), kept, index.numel())
    return shaped.index_add(0, index, torch.where(is_last, outcome, 0.0))


def discounted_suffix_sums(values: Tensor, left: Tensor, discount: float) -> Tensor:
    """y_t = x_t + discount * y_{t+1} inside each sequence, in log2(longest) vector steps.

    After k steps y_t holds the first 2^k terms of its sum; a step adds the 2^k terms that start 2^k positions later.

    Args:
        values: `[num_tokens]` packed x.
        left: `[num_tokens]` int64, tokens that follow in the same sequence (`tokens_left`).
        discount: factor per token.
    """
    sums = values
    reach = 1
    longest = int(left.max()) + 1 if left.numel() else 0
    while reach < longest:
        sums = sums + torch.where(left >= reach, discount**reach * sums.roll(-reach), 0.0)
        reach *= 2
    return sums


def tokens_left(lengths: Tensor, num_tokens: int) -> Tensor:
    """How many tokens of the same sequence follow each token, int64 `[num_tokens]`."""
    ends = repeat_per_token(lengths.cumsum(0), lengths, num_tokens)
    return ends - 1 - torch.arange(num_tokens, device=lengths.device)


def _compress(lengths: Lengths, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of masked-in tokens, and how many of them each sequence has."""
    return (mask != 0).nonzero().squeeze(-1), trained_lengths(mask, lengths)


def _expand(compressed: Tensor, index: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).index_copy(0, index, compressed.to(like.dtype))
