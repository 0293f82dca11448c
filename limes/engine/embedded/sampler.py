"""Drawing tokens: noise keyed by (seed, rollout, sample, position), log-prob of what was drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from limes.engine.protocol import SampleKey, SamplingParams

BLOCK = 256
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
WORD = 2**64 - 1


@dataclass(frozen=True)
class Draw:
    """What one token is drawn with. `banned` are ids that cannot be drawn."""

    sampling: SamplingParams
    key: SampleKey
    position: int
    banned: tuple[int, ...] = ()


def uniform_noise(draws: Sequence[Draw]) -> np.ndarray:
    """A float64 in [0, 1) for each draw, a function of its key and position alone, each taken modulo 2**64.

    Four rounds of SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014), one for each word of the key.
    """
    keys = ((d.key.seed, d.key.rollout_id, d.key.sample_index, d.position) for d in draws)
    words = np.array([[int(word) & WORD for word in key] for key in keys], dtype=np.uint64).reshape(-1, 4)
    state = np.zeros(len(draws), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for word in words.T:
            state = _mix((state ^ word) + GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample_tokens(logits_RV: Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """Draw one token a row by inverting the distribution function.

    Temperature comes first; then `top_k` and `min_p` cut the tempered distribution, then `top_p` what they leave.
    Greedy rows (temperature 0) take the largest logit and report log-probs at temperature 1.

    Args:
        logits_RV: float32, overwritten.
        draws: one for each row.

    Returns:
        token ids and their log-probs under the distribution they were drawn from; NaN log-probs for rows that hold NaN,
        an infinite logit, or nothing that can be drawn.
    """
    for r, draw in enumerate(draws):
        if draw.banned:
            logits_RV[r, list(draw.banned)] = -torch.inf
    greedy = [r for r, draw in enumerate(draws) if draw.sampling.temperature == 0]
    best = logits_RV[greedy].argmax(-1)
    logits_RV.sub_(logits_RV.amax(-1, keepdim=True))  # before the division, which would overflow at low temperatures
    temperatures = [draw.sampling.temperature or 1.0 for draw in draws]
    if any(t != 1.0 for t in temperatures):
        logits_RV.div_(torch.tensor(temperatures, device=logits_RV.device)[:, None])
    probs_RV = logits_RV.exp_()
    _cut(probs_RV, draws)
    chosen, total = _invert(probs_RV, torch.from_numpy(uniform_noise(draws)).to(logits_RV.device))
    chosen[greedy] = best
    log_probs = probs_RV.gather(-1, chosen[:, None])[:, 0].double().log() - total.log()
    return chosen.tolist(), log_probs.clamp(max=0).tolist()


def _cut(probs_RV: Tensor, draws: Sequence[Draw]) -> None:
    """Set to zero what top_k, min_p and top_p leave out, in place."""
    rows = [r for r, d in enumerate(draws) if d.sampling.top_p < 1 or d.sampling.top_k > 0 or d.sampling.min_p > 0]
    if not rows:
        return
    index = torch.tensor(rows, device=probs_RV.device)
    picked = [draws[r].sampling for r in rows]
    vocab = probs_RV.shape[-1]
    top_k = index.new_tensor([s.top_k if s.top_k > 0 else vocab for s in picked])[:, None]
    min_p = probs_RV.new_tensor([s.min_p for s in picked])[:, None]
    top_p = probs_RV.new_tensor([s.top_p for s in picked], dtype=torch.float64)[:, None]
    ordered, order = probs_RV.index_select(0, index).sort(dim=-1, descending=True, stable=True)
    keep = (torch.arange(vocab, device=probs_RV.device) < top_k) & (ordered >= min_p * ordered[:, :1])
    ordered = ordered.where(keep, 0.0)
    total = ordered.double().cumsum(-1)
    before = total - ordered
    keep &= (before < top_p * total[:, -1:]) | (top_p >= 1)
    probs_RV.index_copy_(0, index, torch.zeros_like(ordered).scatter_(-1, order, ordered.where(keep, 0.0)))


def _invert(probs_RV: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the first token whose cumulative weight exceeds `uniform * total`, and the total weight, float64.

    Sums run over blocks first, so that only one block a row is summed token by token.
    """
    num_rows, vocab = probs_RV.shape
    whole = vocab - vocab % BLOCK
    sums = probs_RV[:, :whole].view(num_rows, -1, BLOCK).sum(-1)
    if whole < vocab:
        sums = torch.cat([sums, probs_RV[:, whole:].sum(-1, keepdim=True)], -1)
    upto = sums.double().cumsum(-1)
    total = upto[:, -1].clone()
    target = uniform_R * total
    block = _first_above(upto, target)
    rest = target - torch.where(block > 0, upto.gather(-1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    index = block[:, None] * BLOCK + torch.arange(BLOCK, device=block.device)
    weights = probs_RV.gather(-1, index.clamp(max=vocab - 1)).where(index < vocab, 0.0)
    return block * BLOCK + _first_above(weights.double().cumsum(-1), rest), total


def _first_above(upto: Tensor, target_R: Tensor) -> Tensor:
    """First index whose cumulative weight exceeds the target; where rounding leaves none, the last with any weight."""
    last = (upto < upto[:, -1:]).sum(-1)
    return torch.searchsorted(upto, target_R[:, None], right=True)[:, 0].minimum(last)
