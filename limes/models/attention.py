"""The attention that trainer and engine share: the model's own modules call it, a plan says who attends to what.

A transformers model looks its attention up by name. Under the name `limes` it finds `attention_forward`, which hands
queries, keys and values of packed tokens to the plan that the caller passed to `model(...)` as `attention_plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

NAME = "limes"


class AttentionPlan(Protocol):
    """Attention over the packed tokens of one forward pass."""

    def attend(self, layer: int, query_HND: Tensor, key_KND: Tensor, value_KND: Tensor, scale: float) -> Tensor:
        """Return `[N, H, D]` for N packed tokens, H query heads and K key heads of size D."""
        ...


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    attention_plan: AttentionPlan | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The entry in transformers' attention registry; batch size is 1 because tokens are packed."""
    assert attention_plan is not None, "no attention_plan reaches its attention"
    assert query.shape[0] == 1
    assert dropout == 0.0
    layer = module.layer_idx
    assert isinstance(layer, int)
    return attention_plan.attend(layer, query[0], key[0], value[0], scaling).unsqueeze(0), None


def use_limes_attention(model: PreTrainedModel) -> None:
    """Make `model` attend through plans."""
    AttentionInterface.register(NAME, attention_forward)
    model.set_attn_implementation(NAME)


@dataclass(frozen=True)
class Row:
    """Consecutive new tokens of one sequence: queries `start .. start + num`, keys the sequence's whole path so far.

    `path` holds the storage index of every token of the sequence up to the last query, in order.
    """

    start: int
    num: int
    path: np.ndarray


@dataclass(frozen=True)
class _Batch:
    """Rows of similar size, padded to one shape."""

    query_index: Tensor  # [R * Q]
    key_index: Tensor  # [R * S]
    mask: Tensor | None  # [R, 1, Q, S] bool, True where allowed; None means causal from the first key on
    shape: tuple[int, int, int]  # R, Q, S


class RowAttention:
    """Causal attention of rows, padded only within batches of similar rows.

    Args:
        rows: together they hold every query once.
        num_queries: number of packed tokens.
    """

    def __init__(self, rows: Sequence[Row], num_queries: int, device: torch.device) -> None:
        self.batches: list[_Batch] = []
        order = np.full(num_queries, -1, dtype=np.int64)
        offset = 0
        for members in _similar(rows):
            batch, places = _pad(members, device)
            self.batches.append(batch)
            for row, place in zip(members, places, strict=True):
                order[row.start : row.start + row.num] = offset + place + np.arange(row.num)
            offset += batch.shape[0] * batch.shape[1]
        assert (order >= 0).all(), "every query belongs to a row"
        self.order = torch.from_numpy(order).to(device)

    def attend(self, query_NHD: Tensor, gather: Callable[[Tensor], tuple[Tensor, Tensor]], scale: float) -> Tensor:
        """Attend every query to its path.

        Args:
            query_NHD: packed queries.
            gather: storage indices `[M]` -> keys and values `[M, K, D]`.

        Returns:
            `[N, H, D]` in the order of the queries.
        """
        outputs = []
        for batch in self.batches:
            num_rows, num_q, num_k = batch.shape
            q = query_NHD.index_select(0, batch.query_index).unflatten(0, (num_rows, num_q)).transpose(1, 2)
            k, v = (x.unflatten(0, (num_rows, num_k)).transpose(1, 2) for x in gather(batch.key_index))
            out = scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=batch.mask,
                is_causal=batch.mask is None,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self.order)


class TreeAttention:
    """An attention plan in which keys and values are those of the same forward pass."""

    def __init__(self, rows: Sequence[Row], num_tokens: int, device: torch.device) -> None:
        self.rows = RowAttention(rows, num_tokens, device)

    def attend(self, layer: int, query_HND: Tensor, key_KND: Tensor, value_KND: Tensor, scale: float) -> Tensor:
        """See `AttentionPlan.attend`."""
        key_NKD, value_NKD = key_KND.transpose(0, 1), value_KND.transpose(0, 1)

        def gather(index: Tensor) -> tuple[Tensor, Tensor]:
            return key_NKD.index_select(0, index), value_NKD.index_select(0, index)

        return self.rows.attend(query_HND.transpose(0, 1), gather, scale)


def _similar(rows: Sequence[Row]) -> list[list[Row]]:
    """Batches of rows whose lengths differ by less than a quarter; rows that start a sequence go apart (no mask)."""
    ordered = sorted(rows, key=lambda row: (len(row.path) != row.num, row.num, len(row.path)))
    batches: list[list[Row]] = []
    for row in ordered:
        first = batches[-1][0] if batches else None
        fits = (
            first is not None
            and (len(row.path) == row.num) == (len(first.path) == first.num)
            and row.num <= 1.25 * first.num + 2
            and 0.8 * len(first.path) - 8 <= len(row.path) <= 1.25 * len(first.path) + 8
        )
        if fits:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def _pad(rows: Sequence[Row], device: torch.device) -> tuple[_Batch, list[int]]:
    """Padding repeats a row's last query and last key: no softmax is empty, and no row reads another's numbers, which
    even behind a mask would spread a NaN."""
    num_q, num_k = max(row.num for row in rows), max(len(row.path) for row in rows)
    query_index = np.zeros((len(rows), num_q), dtype=np.int64)
    key_index = np.zeros((len(rows), num_k), dtype=np.int64)
    limit = np.zeros((len(rows), num_q), dtype=np.int64)
    for r, row in enumerate(rows):
        local = np.minimum(np.arange(num_q), row.num - 1)
        query_index[r] = row.start + local
        key_index[r] = row.path[np.minimum(np.arange(num_k), len(row.path) - 1)]
        limit[r] = len(row.path) - row.num + local
    causal = all(len(row.path) == row.num for row in rows)
    mask = None if causal else torch.from_numpy(np.arange(num_k) <= limit[:, :, None]).unsqueeze(1).to(device)
    batch = _Batch(
        torch.from_numpy(query_index.ravel()).to(device),
        torch.from_numpy(key_index.ravel()).to(device),
        mask,
        (len(rows), num_q, num_k),
    )
    return batch, [r * num_q for r in range(len(rows))]
