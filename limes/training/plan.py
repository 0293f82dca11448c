"""The micro-batches of all ranks: as many on each of them, since they compute together."""

from __future__ import annotations

from collections.abc import Sequence

from limes.training.packing import cut_micro_batches
from limes.training.ranks import Ranks


def plan_micro_batches(
    sequences: Sequence[Sequence[int]], max_tokens: int, *, share: bool, ranks: Ranks
) -> list[list[int]]:
    """This rank's micro-batches, as many as every other rank's; they may be empty where the sequences run out."""
    cut = cut_micro_batches(sequences, max_tokens, share=share)
    if ranks.is_alone:
        return cut
    return split_further(cut, [len(tokens) for tokens in sequences], ranks.most(len(cut)))


def split_further(batches: Sequence[list[int]], lengths: Sequence[int], num: int) -> list[list[int]]:
    """`num` batches: the heaviest are halved, and where each has one sequence, empty ones follow."""
    found = list(batches)
    while len(found) < num:
        splittable = [batch for batch in found if len(batch) > 1]
        if not splittable:
            return found + [[] for _ in range(num - len(found))]
        heaviest = max(splittable, key=lambda batch: sum(lengths[i] for i in batch))
        place, middle = found.index(heaviest), _middle([lengths[i] for i in heaviest])
        found[place : place + 1] = [heaviest[:middle], heaviest[middle:]]
    return found


def _middle(lengths: Sequence[int]) -> int:
    """How many of the first make up about half; at least one, and not all."""
    half, total = sum(lengths) / 2, 0
    for i, length in enumerate(lengths):
        total += length
        if total >= half:
            return min(max(1, i + (total - half <= half - (total - length))), len(lengths) - 1)
    raise AssertionError("lengths are positive")
