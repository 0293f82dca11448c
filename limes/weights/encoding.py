"""The change of a tensor in few bytes: where words changed, and by how much, as byte planes that deflate may shrink.

Weights after an optimizer step differ from before by small numbers when their bits are read as integers: floats of one
sign are ordered like their bits. So the high bytes of the differences are nearly all zero.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

PROBE_BYTES = 1 << 16
WORTH_IT = 0.7  # deflate only what it shrinks below this share: it is slow where it gains little
LEVEL = 1
DENSE = 0.5  # above this share of changed words, positions cost more than differences of zero


@dataclass(frozen=True, slots=True)
class Plane:
    """Byte `index` of each number. A plane of zeros is left out."""

    index: int
    deflated: bool
    content: bytes


@dataclass(frozen=True, slots=True)
class Change:
    """What changed between two tensors of one shape and type.

    Attributes:
        num_changed: words that differ.
        gaps: unchanged words before each changed one. Where most words changed there are none, and all words have a
            difference.
        differences: new minus old, sign folded into the lowest bit.
    """

    num_changed: int
    is_dense: bool
    gaps: tuple[Plane, ...]
    differences: tuple[Plane, ...]


def diff(old: Tensor, new: Tensor) -> Change:
    """What turns the words `old` into `new`; both `[num_words]`."""
    changed = old != new
    num = int(changed.sum())
    if num > DENSE * len(old):
        return Change(num, True, (), _planes(_fold(new - old)))
    positions = changed.nonzero()[:, 0]
    before = torch.cat([positions.new_full((1,), -1), positions[:-1]]) if num else positions
    return Change(num, False, _planes(positions - before - 1), _planes(_fold(new[positions] - old[positions])))


def moves(change: Change, words: Tensor) -> tuple[Tensor | None, Tensor]:
    """Positions of the words that a change moves (None: all of them), and by how much, for `words` `[num_words]`.

    Raises:
        ValueError: the change is not one of such words.
    """
    num = len(words) if change.is_dense else change.num_changed
    if not 0 <= change.num_changed <= len(words):
        raise ValueError(f"{change.num_changed} changes of {len(words)} words")
    moved = _unfold(_numbers(change.differences, num, words.dtype).to(words.device))
    if change.is_dense:
        return None, moved
    positions = (_numbers(change.gaps, num, torch.int64).to(words.device) + 1).cumsum(0) - 1
    if num and not (
        bool((positions[1:] > positions[:-1]).all()) and 0 <= int(positions[0]) <= int(positions[-1]) < len(words)
    ):
        raise ValueError(f"changes of words that are not among the {len(words)}")
    return positions, moved


def move(words: Tensor, positions: Tensor | None, moved: Tensor) -> None:
    """Add to the words, in place; positions are distinct."""
    if positions is None:
        words.add_(moved)
    else:
        words[positions] += moved


def _fold(moved: Tensor) -> Tensor:
    """0, -1, 1, -2, ... become 0, 1, 2, 3, ..."""
    return (moved << 1) ^ (moved >> (8 * moved.element_size() - 1))


def _unfold(folded: Tensor) -> Tensor:
    low_bits = ~(-1 << (8 * folded.element_size() - 1))  # the shift brings copies of the highest bit in
    return ((folded >> 1) & low_bits) ^ -(folded & 1)


def _planes(numbers: Tensor) -> tuple[Plane, ...]:
    """Bytes of integers, least first."""
    content = numbers.view(torch.uint8).reshape(len(numbers), numbers.element_size())
    found = []
    for index in range(content.shape[1]):
        plane = content[:, index]
        if bool(plane.any()):
            found.append(_plane(index, plane.cpu().contiguous().numpy().tobytes()))
    return tuple(found)


def _plane(index: int, content: bytes) -> Plane:
    middle = len(content) // 2
    probe = content[max(0, middle - PROBE_BYTES // 2) :][:PROBE_BYTES]
    if len(zlib.compress(probe, LEVEL)) < WORTH_IT * len(probe):
        packed = zlib.compress(content, LEVEL)
        if len(packed) < len(content):
            return Plane(index, True, packed)
    return Plane(index, False, content)


def _numbers(planes: tuple[Plane, ...], num: int, dtype: torch.dtype) -> Tensor:
    """`[num]` integers from their bytes."""
    content = torch.zeros(num, dtype.itemsize, dtype=torch.uint8)
    for plane in planes:
        data = zlib.decompress(plane.content) if plane.deflated else plane.content
        if len(data) != num or not 0 <= plane.index < dtype.itemsize:
            raise ValueError(f"byte plane {plane.index} has {len(data)} bytes for {num} numbers of {dtype}")
        content[:, plane.index] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return content.reshape(-1).view(dtype)
