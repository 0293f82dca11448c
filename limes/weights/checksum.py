"""A 64-bit checksum of a tensor's bits that any device computes alike, and that changes of few words can be carried to.

The bits are read as words of at most 4 bytes. Word i counts times an odd number that depends on i, all modulo 2^64:
the sum depends on every bit and place, not on the order of addition, and new words add (new - old) times that number.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
BLOCK = 1 << 12
BLOCKS_AT_ONCE = 1 << 4  # what is widened to 64 bits at a time stays in a CPU's cache
BLOCKS_AT_ONCE_ON_GPU = 1 << 13
STEP, MIX = -7046029254386353131, -4658895280553007687  # odd 64-bit constants of the splitmix generator


def words_of(tensor: Tensor) -> Tensor:
    """The bits of a tensor as integers of its element size, or of 4 bytes if that is larger, `[num_words]`.

    A view if the tensor is contiguous.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(WORDS[min(tensor.element_size(), 4)])


def checksum(tensor: Tensor) -> int:
    """Checksum of a tensor's bits; its shape and type are not in it."""
    words = words_of(tensor)
    whole = len(words) // BLOCK
    at_once = BLOCKS_AT_ONCE if words.device.type == "cpu" else BLOCKS_AT_ONCE_ON_GPU
    factors = _factors(words.device)
    sums = [
        (part.view(-1, BLOCK).to(torch.int64) * factors).sum(1)
        for part in words[: whole * BLOCK].split(at_once * BLOCK)
        if len(part)
    ]
    rest = words[whole * BLOCK :].to(torch.int64)
    sums.append((rest * factors[: len(rest)]).sum()[None])
    block_sums = torch.cat(sums)
    return int((block_sums * _odd(torch.arange(len(block_sums), device=words.device) + BLOCK)).sum())


def carried(total: int, positions: Tensor, old: Tensor, new: Tensor) -> int:
    """The checksum after the words at `positions` went from `old` to `new`; all `[num]`."""
    factors = _factors(positions.device)[positions % BLOCK] * _odd(positions // BLOCK + BLOCK)
    moved = int(((new.to(torch.int64) - old.to(torch.int64)) * factors).sum())
    return (total + moved + (1 << 63)) % (1 << 64) - (1 << 63)


@cache
def _factors(device: torch.device) -> Tensor:
    """`[BLOCK]` odd numbers."""
    return _odd(torch.arange(BLOCK, device=device))


def _odd(numbers: Tensor) -> Tensor:
    """An odd number without pattern for each of `numbers`, int64."""
    mixed = (numbers + 1) * STEP
    mixed = (mixed ^ (mixed >> 29)) * MIX
    return (mixed ^ (mixed >> 32)) | 1
