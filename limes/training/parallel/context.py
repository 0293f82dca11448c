"""Context parallelism: the packed tokens of a micro-batch are cut over ranks, and each gathers all keys and values.

The cut looks at work: tokens with long paths cost more. Since a plan names the keys of every query, attention itself
does not change; a rank computes its own queries against the gathered keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from limes.models.attention import Row, RowAttention
from limes.models.lm_head import HeadTargets
from limes.training.packing import PackedBatch
from limes.training.parallel.collectives import gather_same, gather_shared


class GatheredAttention:
    """An attention plan of this rank's queries over the keys of all ranks.

    Args:
        rows: of own queries; their paths lead through gathered keys.
        room: most tokens of a rank.
    """

    def __init__(
        self, rows: Sequence[Row], num_queries: int, room: int, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._rows = RowAttention(rows, num_queries, device)
        self._room, self._group = room, group

    def attend(self, layer: int, query_HND: Tensor, key_KND: Tensor, value_KND: Tensor, scale: float) -> Tensor:
        """See `AttentionPlan.attend`."""
        own = torch.stack([key_KND.transpose(0, 1), value_KND.transpose(0, 1)], dim=1)
        keys_values = gather_shared(own, self._room, self._group)

        def gather(index: Tensor) -> tuple[Tensor, Tensor]:
            key, value = keys_values.index_select(0, index).unbind(1)
            return key, value

        return self._rows.attend(query_HND.transpose(0, 1), gather, scale)


class ContextCut:
    """One rank's part of a packed batch.

    Every rank has at least one token and one head row, so that all take part in every collective, forward and backward:
    a rank without any computes the first token once more, for nobody.

    Args:
        dense_tokens: path length at which attention costs as much as all else of a token.

    Attributes:
        part: own tokens, head rows and targets; its `pair_index` and `lengths` are those of the whole batch.
    """

    def __init__(
        self, batch: PackedBatch, group: dist.ProcessGroup, device: torch.device, *, dense_tokens: float
    ) -> None:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self._group = group
        positions = batch.positions.cpu().numpy()
        chunks = _cut(positions, size, dense_tokens)
        owner, local = _places(chunks, size, len(positions))
        counts = np.bincount(owner, minlength=size)
        room = max(1, int(counts.max()))
        rows = _own_rows(batch.rows, [chunks[rank], chunks[2 * size - 1 - rank]], local, owner * room + local)
        own = np.flatnonzero(owner == rank)
        if not len(own):
            own = np.zeros(1, dtype=np.int64)
            rows = [Row(0, 1, np.asarray([owner[0] * room + local[0]]))]
        head_rows, targets, self._row_place, self._pair_place, self._rooms = _own_head(batch, owner, local, rank, size)
        index = torch.from_numpy(own).to(device)
        self.part = replace(
            batch,
            token_ids=batch.token_ids[index],
            positions=batch.positions[index],
            attention=GatheredAttention(rows, len(own), room, group, device),
            head_rows=head_rows.to(device),
            targets=targets,
        )
        self._row_place, self._pair_place = self._row_place.to(device), self._pair_place.to(device)

    def gather_rows(self, own_P: Tensor) -> Tensor:
        """One value a head row of the whole batch, from those of each rank's."""
        return gather_same(own_P, self._rooms[0], self._group).index_select(0, self._row_place)

    def gather_pairs(self, own_M: Tensor) -> Tensor:
        """One value a pair of the whole batch, from those of each rank's."""
        return gather_same(own_M, self._rooms[1], self._group).index_select(0, self._pair_place)


def _cut(positions: np.ndarray, size: int, dense_tokens: float) -> list[tuple[int, int]]:
    """2 `size` runs of tokens of about equal work, in order; a rank gets one from each end."""
    work = np.cumsum(1.0 + positions / dense_tokens)
    bounds = np.searchsorted(work, work[-1] * np.arange(1, 2 * size) / (2 * size))
    edges = [0, *(int(b) for b in bounds), len(positions)]
    return [(edges[i], max(edges[i], edges[i + 1])) for i in range(2 * size)]


def _places(chunks: list[tuple[int, int]], size: int, num: int) -> tuple[np.ndarray, np.ndarray]:
    """Each token's rank, and its place among that rank's tokens."""
    owner, local = np.empty(num, dtype=np.int64), np.empty(num, dtype=np.int64)
    for rank in range(size):
        first, second = chunks[rank], chunks[2 * size - 1 - rank]
        own = np.concatenate([np.arange(*first), np.arange(*second)])
        owner[own], local[own] = rank, np.arange(len(own))
    return owner, local


def _own_rows(
    rows: Sequence[Row], chunks: Sequence[tuple[int, int]], local: np.ndarray, storage: np.ndarray
) -> list[Row]:
    """The parts of rows that lie in own chunks."""
    found = []
    for row in rows:
        before = len(row.path) - row.num
        for first, last in chunks:
            start, end = max(first, row.start), min(last, row.start + row.num)
            if start < end:
                path = storage[row.path[: before + end - row.start]]
                found.append(Row(int(local[start]), end - start, path))
    return found


def _own_head(
    batch: PackedBatch, owner: np.ndarray, local: np.ndarray, rank: int, size: int
) -> tuple[Tensor, HeadTargets, Tensor, Tensor, tuple[int, int]]:
    """Own head rows and targets; where each row and pair of the batch lies once gathered; room for each rank's."""
    head_rows, row_M = batch.head_rows.cpu().numpy(), batch.targets.row_M.cpu().numpy()
    device = batch.targets.token_M.device
    row_owner = owner[head_rows]
    row_local, row_room = _numbered(row_owner, size)
    pair_local, pair_room = _numbered(row_owner[row_M], size)
    own_pairs = np.flatnonzero(row_owner[row_M] == rank)
    own_rows = local[head_rows[row_owner == rank]]
    rows, tokens = torch.from_numpy(row_local[row_M[own_pairs]]), batch.targets.token_M[torch.from_numpy(own_pairs)]
    if not len(own_rows):
        own_rows, rows, tokens = np.zeros(1, np.int64), torch.zeros(1, dtype=torch.int64), tokens.new_zeros(1)
    offsets = np.searchsorted(rows.numpy(), np.arange(len(own_rows) + 1)).tolist()
    row_place = torch.from_numpy(row_owner * row_room + row_local)
    pair_place = torch.from_numpy(row_owner[row_M] * pair_room + pair_local)
    targets = HeadTargets(rows.to(device), tokens, offsets)
    return torch.from_numpy(own_rows), targets, row_place, pair_place, (row_room, pair_room)


def _numbered(owner: np.ndarray, size: int) -> tuple[np.ndarray, int]:
    """The place of each entry among those of its rank, and the most that a rank has (at least one)."""
    place = np.empty(len(owner), dtype=np.int64)
    for rank in range(size):
        own = np.flatnonzero(owner == rank)
        place[own] = np.arange(len(own))
    return place, max(1, int(np.bincount(owner, minlength=size).max()))
