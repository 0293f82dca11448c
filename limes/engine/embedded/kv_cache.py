"""The tensors of the KV cache, and attention of one engine step over them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from limes.models.attention import Row, RowAttention
from limes.models.policy import Policy


class KVCache:
    """Keys and values of all layers, `[K * slots, D]` each: slot s of key head h is row `h * slots + s`.

    A slot holds one token; page p holds slots `p * page_size .. (p + 1) * page_size`.
    """

    def __init__(self, policy: Policy, num_slots: int) -> None:
        self.num_heads, self.head_dim = policy.kv_shape
        self.num_slots = num_slots
        shape = (policy.num_layers, self.num_heads * num_slots, self.head_dim)
        self.device = policy.device
        self.keys = torch.empty(shape, dtype=policy.dtype, device=self.device)
        self.values = torch.empty(shape, dtype=policy.dtype, device=self.device)

    def rows(self, slots: np.ndarray) -> Tensor:
        """Row numbers of slots for every key head, `[K, ...]`."""
        heads = np.arange(self.num_heads).reshape(-1, *[1] * slots.ndim) * self.num_slots
        return torch.from_numpy(heads + slots).to(self.device)

    def write(self, layer: int, rows_KN: Tensor, key_KND: Tensor, value_KND: Tensor) -> None:
        """Store packed keys and values."""
        self.keys[layer].index_copy_(0, rows_KN.view(-1), key_KND.reshape(-1, self.head_dim))
        self.values[layer].index_copy_(0, rows_KN.view(-1), value_KND.reshape(-1, self.head_dim))


class StepAttention:
    """The plan of one engine step: decoded tokens first, then pieces of prompts.

    Args:
        write_slots: slot of every packed token.
        decodes: (prompt slots, own slots) of each decoded token's sequence; those of one prompt share the same object.
        pieces: one row for each piece of a prompt; starts count from the first packed token.
    """

    def __init__(
        self, cache: KVCache, write_slots: np.ndarray, decodes: Seq[tuple[np.ndarray, np.ndarray]], pieces: Seq[Row]
    ) -> None:
        self.cache = cache
        self.write_rows = cache.rows(write_slots)
        self.num_decodes = len(decodes)
        self.decode = DecodeAttention(cache, decodes) if decodes else None
        shifted = [Row(row.start - len(decodes), row.num, row.path) for row in pieces]
        self.pieces = RowAttention(shifted, len(write_slots) - len(decodes), cache.device) if pieces else None

    def attend(self, layer: int, query_HND: Tensor, key_KND: Tensor, value_KND: Tensor, scale: float) -> Tensor:
        """See `AttentionPlan.attend`; the new keys and values are stored first."""
        self.cache.write(layer, self.write_rows, key_KND, value_KND)
        query_NHD = query_HND.transpose(0, 1)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        outputs = []
        if self.decode is not None:
            outputs.append(self.decode.attend(query_NHD[: self.num_decodes], keys, values, scale))
        if self.pieces is not None:
            by_slot = [x.view(self.cache.num_heads, -1, self.cache.head_dim) for x in (keys, values)]

            def gather(index: Tensor) -> tuple[Tensor, Tensor]:
                key, value = (x.index_select(1, index).transpose(0, 1) for x in by_slot)
                return key, value

            outputs.append(self.pieces.attend(query_NHD[self.num_decodes :], gather, scale))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class DecodeAttention:
    """One new token a sequence. The keys of a prompt are read once for all answers that grow from it.

    Scores against the prompt and against the sequence's own tokens go through one softmax.
    """

    def __init__(self, cache: KVCache, decodes: Seq[tuple[np.ndarray, np.ndarray]]) -> None:
        self.heads, self.num = cache.num_heads, len(decodes)
        groups: dict[int, list[int]] = {}
        for n, (prompt, _) in enumerate(decodes):
            groups.setdefault(id(prompt), []).append(n)
        self.num_groups = len(groups)
        self.width = max(len(members) for members in groups.values())
        members = np.zeros((self.num_groups, self.width), dtype=np.int64)
        place = np.zeros(self.num, dtype=np.int64)
        for g, numbers in enumerate(groups.values()):
            members[g, : len(numbers)] = numbers
            place[numbers] = g * self.width + np.arange(len(numbers))
        prompts = [decodes[numbers[0]][0] for numbers in groups.values()]
        self.prompt_rows, self.prompt_mask, self.prompt_len = _padded(cache, prompts)
        self.own_rows, self.own_mask, self.own_len = _padded(cache, [own for _, own in decodes])
        in_order = np.array_equal(members.ravel(), np.arange(self.num))
        self.members = None if in_order else torch.from_numpy(members.ravel()).to(cache.device)
        self.place = None if in_order else torch.from_numpy(place).to(cache.device)

    def attend(self, query_NHD: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """`[N, H, D]` for N sequences; `keys` and `values` are the whole layer, `[K * slots, D]`."""
        num_heads, dim = query_NHD.shape[1:]
        heads, num, repeat = self.heads, self.num, num_heads // self.heads
        query_KNRD = query_NHD.unflatten(1, (heads, repeat)).transpose(0, 1) * scale
        grouped = self._to_groups(query_KNRD).reshape(heads * self.num_groups, self.width * repeat, dim)
        prompt_keys = keys.index_select(0, self.prompt_rows).view(-1, self.prompt_len, dim)
        prompt_scores = torch.bmm(grouped, prompt_keys.transpose(1, 2)).view(
            heads, self.num_groups, -1, self.prompt_len
        )
        prompt_scores = self._from_groups((prompt_scores + self.prompt_mask).view(heads, -1, repeat, self.prompt_len))
        own_keys = keys.index_select(0, self.own_rows).view(-1, self.own_len, dim)
        own_scores = torch.bmm(query_KNRD.reshape(heads * num, repeat, dim), own_keys.transpose(1, 2))
        own_scores = own_scores.view(heads, num, repeat, self.own_len) + self.own_mask
        weights = torch.cat([prompt_scores, own_scores], -1).float().softmax(-1).to(query_NHD.dtype)
        own_values = values.index_select(0, self.own_rows).view(-1, self.own_len, dim)
        out = torch.bmm(weights[..., self.prompt_len :].flatten(0, 1), own_values).view(heads, num, repeat, dim)
        prompt_values = values.index_select(0, self.prompt_rows).view(-1, self.prompt_len, dim)
        grouped_weights = self._to_groups(weights[..., : self.prompt_len])
        grouped_weights = grouped_weights.reshape(heads * self.num_groups, self.width * repeat, self.prompt_len)
        out = out + self._from_groups(torch.bmm(grouped_weights, prompt_values).view(heads, -1, repeat, dim))
        return out.transpose(0, 1).reshape(num, num_heads, dim)

    def _to_groups(self, x_KN: Tensor) -> Tensor:
        return x_KN if self.members is None else x_KN.index_select(1, self.members)

    def _from_groups(self, x_KN: Tensor) -> Tensor:
        return x_KN if self.place is None else x_KN.index_select(1, self.place)


def _padded(cache: KVCache, paths: Seq[np.ndarray]) -> tuple[Tensor, Tensor, int]:
    """Cache rows `[K * P * L]` of paths padded to the longest, a mask `[P, 1, L]` that is -inf on padding, and L.

    Padding repeats a path's last slot: a slot that was never written may hold a NaN, which no mask keeps out.
    """
    longest = max(len(path) for path in paths)
    slots = np.zeros((len(paths), longest), dtype=np.int64)
    mask = np.full((len(paths), 1, longest), -np.inf, dtype=np.float32)
    for i, path in enumerate(paths):
        slots[i] = path[np.minimum(np.arange(longest), len(path) - 1)]
        mask[i, 0, : len(path)] = 0
    return cache.rows(slots).view(-1), torch.from_numpy(mask).to(cache.device, cache.keys.dtype), longest
