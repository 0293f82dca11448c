"""The tensors of the KV cache, and attention of one engine step over them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from limes.models.attention import Row, RowAttention
from limes.models.policy import Policy


class KVCache:
    """Keys and values of all layers, `[K * slots, 2D]` each: slot s of key head h is row `h * slots + s`, key first.

    A slot holds one token; page p holds slots `p * page_size .. (p + 1) * page_size`.
    """

    def __init__(self, policy: Policy, num_slots: int) -> None:
        self.num_heads, self.head_dim = policy.kv_shape
        self.num_slots = num_slots
        self.device = policy.device
        shape = (policy.num_layers, self.num_heads * num_slots, 2 * self.head_dim)
        self.layers = torch.empty(shape, dtype=policy.dtype, device=self.device)

    def rows(self, slots: np.ndarray) -> Tensor:
        """Row numbers of slots for every key head, `[K, ...]`."""
        heads = np.arange(self.num_heads).reshape(-1, *[1] * slots.ndim) * self.num_slots
        return torch.from_numpy(heads + slots).to(self.device)

    def write(self, layer: int, rows_KN: Tensor, key_KND: Tensor, value_KND: Tensor) -> None:
        """Store packed keys and values."""
        self.layers[layer].index_copy_(0, rows_KN.view(-1), torch.cat([key_KND, value_KND], -1).flatten(0, 1))


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
        outputs = []
        if self.decode is not None:
            outputs.append(self.decode.attend(layer, query_HND[:, : self.num_decodes], scale))
        if self.pieces is not None:
            by_slot = self.cache.layers[layer].unflatten(0, (self.cache.num_heads, -1))

            def gather(index: Tensor) -> tuple[Tensor, Tensor]:
                key, value = by_slot.index_select(1, index).transpose(0, 1).chunk(2, -1)
                return key, value

            outputs.append(self.pieces.attend(query_HND[:, self.num_decodes :].transpose(0, 1), gather, scale))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class DecodeAttention:
    """One new token a sequence. The keys of a prompt are read once for all answers that grow from it.

    Scores against the prompt and against the sequence's own tokens go through one softmax.
    """

    def __init__(self, cache: KVCache, decodes: Seq[tuple[np.ndarray, np.ndarray]]) -> None:
        self.num_key_heads = cache.num_heads
        groups: dict[int, list[int]] = {}
        for n, (prompt, _) in enumerate(decodes):
            groups.setdefault(id(prompt), []).append(n)
        width = max(len(members) for members in groups.values())
        members = np.zeros((len(groups), width), dtype=np.int64)
        place = np.zeros(len(decodes), dtype=np.int64)
        for g, numbers in enumerate(groups.values()):
            members[g, : len(numbers)] = numbers
            place[numbers] = g * width + np.arange(len(numbers))
        self.prompts = Paths(cache, [decodes[numbers[0]][0] for numbers in groups.values()])
        self.own = Paths(cache, [own for _, own in decodes])
        in_order = np.array_equal(members.ravel(), np.arange(len(decodes)))
        self.members = None if in_order else torch.from_numpy(members.ravel()).to(cache.device)
        self.place = None if in_order else torch.from_numpy(place).to(cache.device)

    def attend(self, layer: int, query_HND: Tensor, scale: float) -> Tensor:
        """`[N, H, D]` for N sequences."""
        num_heads, num, dim = query_HND.shape
        query_KNRD = query_HND.unflatten(0, (self.num_key_heads, -1)).transpose(1, 2).contiguous()
        prompt_keys, prompt_values = self.prompts.read(layer)
        own_keys, own_values = self.own.read(layer)
        prompt_scores = self._from_groups(self.prompts.scores(self._to_groups(query_KNRD), prompt_keys, scale))
        own_scores = self.own.scores(query_KNRD, own_keys, scale)
        weights = torch.cat([prompt_scores, own_scores], -1).softmax(-1, torch.float32).to(query_HND.dtype)
        to_prompt, to_own = weights.split([self.prompts.longest, self.own.longest], -1)
        out = self.own.weighted(to_own, own_values)
        out += self._from_groups(self.prompts.weighted(self._to_groups(to_prompt), prompt_values))
        return out.transpose(0, 1).reshape(num, num_heads, dim)

    def _to_groups(self, x_KN: Tensor) -> Tensor:
        return x_KN if self.members is None else x_KN.index_select(1, self.members)

    def _from_groups(self, x_KN: Tensor) -> Tensor:
        return x_KN if self.place is None else x_KN.index_select(1, self.place)


class Paths:
    """Tokens in the cache that queries attend to: P lists of slots, padded to the longest.

    Padding repeats a list's last slot: a slot that was never written may hold a NaN, which no mask keeps out.
    """

    def __init__(self, cache: KVCache, paths: Seq[np.ndarray]) -> None:
        self.cache = cache
        self.longest = max(len(path) for path in paths)
        slots = np.zeros((len(paths), self.longest), dtype=np.int64)
        mask = np.full((len(paths), 1, self.longest), -np.inf, dtype=np.float32)
        for i, path in enumerate(paths):
            slots[i] = path[np.minimum(np.arange(self.longest), len(path) - 1)]
            mask[i, 0, : len(path)] = 0
        self.rows = cache.rows(slots).view(-1)
        self.mask = torch.from_numpy(np.tile(mask, (cache.num_heads, 1, 1))).to(cache.device, cache.layers.dtype)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values, `[K * P, L, D]` each, of all key heads."""
        keys, values = (
            self.cache.layers[layer].index_select(0, self.rows).view(len(self.mask), self.longest, -1).chunk(2, -1)
        )
        return keys, values

    def scores(self, query: Tensor, keys: Tensor, scale: float) -> Tensor:
        """Masked scores `[K, P * W, R, L]` of queries `[K, P * W, R, D]`, W in a row for each path."""
        rows = query.reshape(len(self.mask), -1, query.shape[-1])
        return torch.baddbmm(self.mask, rows, keys.transpose(1, 2), alpha=scale).view(*query.shape[:-1], -1)

    def weighted(self, weights: Tensor, values: Tensor) -> Tensor:
        """Sums of values `[K, P * W, R, D]` with weights `[K, P * W, R, L]`."""
        rows = weights.reshape(len(self.mask), -1, weights.shape[-1])
        return torch.bmm(rows, values).view(*weights.shape[:-1], -1)
