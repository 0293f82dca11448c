"""Packing: many sequences become one run of tokens in which common beginnings stand once.

Sorted by their tokens, each sequence shares its longest common beginning with the one before it. What is shared is
computed once, forward and backward: a token's hidden state depends on its own beginning alone, so log-probs and
gradients equal those of separate sequences. Nothing is padded, and the last token of a sequence, whose output nobody
reads, is not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from limes.models.attention import AttentionPlan, Row, TreeAttention
from limes.models.lm_head import HeadTargets


@dataclass(frozen=True)
class PackedBatch:
    """Packed tokens of one forward pass.

    Attributes:
        token_ids: `[N]` tokens that are computed.
        positions: `[N]` their positions in their sequences.
        attention: who attends to whom.
        rows: what `attention` is made of.
        head_rows: `[P]` packed tokens whose logits are needed.
        targets: scored tokens of each head row, M pairs.
        pair_index: `[T]` for each response token of each sequence, in the order the sequences were given, its pair.
        lengths: response tokens of each sequence; they sum to T.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionPlan
    rows: list[Row]
    head_rows: Tensor
    targets: HeadTargets
    pair_index: Tensor
    lengths: list[int]

    @property
    def head_row_index(self) -> Tensor:
        """`[T]` for each response token, the head row that predicted it."""
        return self.targets.row_M.index_select(0, self.pair_index)


def pack(
    sequences: Sequence[Sequence[int]], response_lengths: Sequence[int], device: torch.device, *, share: bool = True
) -> PackedBatch:
    """Pack sequences whose last `response_lengths` tokens are scored.

    Args:
        sequences: prompt and response ids; each prompt has at least one token.
        share: compute common beginnings once.
    """
    arrays = [np.asarray(tokens, dtype=np.int64) for tokens in sequences]
    assert all(len(a) > n for a, n in zip(arrays, response_lengths, strict=True)), "every prompt has a token"
    token_parts: list[np.ndarray] = []
    position_parts: list[np.ndarray] = []
    rows: list[Row] = []
    paths: dict[int, np.ndarray] = {}
    num, previous = 0, None
    for i, shared in _sorted_with_shared(arrays, share):
        new = arrays[i][shared:-1]
        beginning = paths[previous][:shared] if previous is not None else np.empty(0, dtype=np.int64)
        paths[i] = np.concatenate([beginning, num + np.arange(len(new))])
        if len(new):
            rows.append(Row(num, len(new), paths[i]))
        token_parts.append(new)
        position_parts.append(shared + np.arange(len(new)))
        num, previous = num + len(new), i
    parents = [paths[i][len(a) - 1 - n :] for i, (a, n) in enumerate(zip(arrays, response_lengths, strict=True))]
    scored = [a[len(a) - n :] for a, n in zip(arrays, response_lengths, strict=True)]
    head_rows, targets, pair_index = _head(np.concatenate(parents), np.concatenate(scored), device)
    return PackedBatch(
        token_ids=torch.from_numpy(np.concatenate(token_parts)).to(device),
        positions=torch.from_numpy(np.concatenate(position_parts)).to(device),
        attention=TreeAttention(rows, num, device),
        rows=rows,
        head_rows=head_rows,
        targets=targets,
        pair_index=pair_index,
        lengths=list(response_lengths),
    )


def cut_micro_batches(sequences: Sequence[Sequence[int]], max_tokens: int, *, share: bool = True) -> list[list[int]]:
    """Split sequences into packs of at most `max_tokens` computed tokens; a longer sequence goes alone.

    In sorted order, each goes where it has most in common with the one before, so that groups share their prompts, and
    of several such packs into the first that has room.
    """
    arrays = [np.asarray(tokens, dtype=np.int64) for tokens in sequences]
    batches: list[list[int]] = []
    room = np.zeros(len(arrays), dtype=np.int64)  # of each pack, the ones to come included
    common = np.zeros(len(arrays), dtype=np.int64)  # tokens that its last sequence has in common with the next one
    for i, shared in _sorted_with_shared(arrays, share):
        cost, num = len(arrays[i]) - 1, len(batches)
        np.minimum(common[:num], shared, out=common[:num])
        fits = cost - common[:num] <= room[:num]
        place = int(np.where(fits, common[:num], -1).argmax()) if fits.any() else num
        if place == num:
            batches.append([])
            room[num] = max_tokens
        batches[place].append(i)
        room[place] -= cost - common[place]
        common[place] = cost
    return [sorted(batch) for batch in batches]


def _sorted_with_shared(arrays: list[np.ndarray], share: bool) -> list[tuple[int, int]]:
    """Indices in order of their tokens, each with how many computed tokens it has in common with the one before."""
    if not share or not arrays:
        return [(i, 0) for i in range(len(arrays))]
    order = sorted(range(len(arrays)), key=lambda i: (arrays[i].tolist(), i))
    shared = [0]
    for before, after in pairwise(order):
        a, b = arrays[before][:-1], arrays[after][:-1]
        num = min(len(a), len(b))
        differ = np.flatnonzero(a[:num] != b[:num])
        shared.append(int(differ[0]) if len(differ) else num)
    return list(zip(order, shared, strict=True))


def _head(parents: np.ndarray, tokens: np.ndarray, device: torch.device) -> tuple[Tensor, HeadTargets, Tensor]:
    """Distinct (parent, token) pairs, sorted by parent, and where each response token finds its pair."""
    pairs, pair_index = np.unique(np.stack([parents, tokens]), axis=1, return_inverse=True)
    head_rows, row_of_pair = np.unique(pairs[0], return_inverse=True)
    offsets = np.searchsorted(row_of_pair, np.arange(len(head_rows) + 1)).tolist()
    targets = HeadTargets(torch.from_numpy(row_of_pair).to(device), torch.from_numpy(pairs[1]).to(device), offsets)
    return torch.from_numpy(head_rows).to(device), targets, torch.from_numpy(pair_index.ravel()).to(device)
