"""Which data-parallel rank trains on which samples: about the same work for each, and prompts computed once."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

from limes.records import Sample, step_bounds

DENSE_TOKENS = 8192.0
"""Length of the text before a token at which attention costs as much as all else; 4k to 30k in models of 0.6B to 8B."""
TOLERANCE = 1.1
"""Load of the busiest rank, of the mean, above which a group is cut in two."""


def deal(
    samples: Sequence[Sample], trained: Sequence[int], num_ranks: int, *, num_steps: int = 1, keep_groups: bool = False
) -> list[list[int]]:
    """Deal samples out, each optimizer step for itself, so that ranks are evenly busy in every step.

    Args:
        samples: of a rollout, in global order.
        trained: positions of those that train, in order.
        num_steps: optimizer steps that the rollout is cut into.
        keep_groups: never cut a group, however uneven that is; a step's border cuts it all the same.

    Returns:
        Positions of each rank's, in order.
    """
    if num_ranks == 1:
        return [list(trained)]
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for start, end in pairwise(step_bounds(len(samples), num_steps)):
        own = [position for position in trained if start <= position < end]
        parts = _balanced(samples, own, num_ranks, keep_groups)
        # the lightest part of this step goes to the rank that has had most so far
        parts.sort(key=lambda part: _load(samples, part))
        for rank, part in zip(sorted(range(num_ranks), key=lambda rank: -loads[rank]), parts, strict=True):
            loads[rank] += _load(samples, part)
            ranks[rank] += [position for unit in part for position in unit]
    return [sorted(rank) for rank in ranks]


Unit = list[int]
"""Positions of samples that begin alike."""


def _balanced(
    samples: Sequence[Sample], positions: Sequence[int], num_ranks: int, keep_groups: bool
) -> list[list[Unit]]:
    """Groups on ranks; the largest group of the busiest rank is halved until the work is even enough."""
    by_group: dict[int, Unit] = {}
    for position in positions:
        by_group.setdefault(samples[position].group_index, []).append(position)
    units = list(by_group.values())
    while True:
        parts = [[units[i] for i in part] for part in karmarkar_karp([_cost(samples, u) for u in units], num_ranks)]
        loads = [_load(samples, part) for part in parts]
        busiest = parts[loads.index(max(loads))]
        divisible = [unit for unit in busiest if len(unit) > 1]
        if keep_groups or not divisible or max(loads) <= TOLERANCE * sum(loads) / num_ranks:
            return parts
        largest = max(divisible, key=lambda unit: _cost(samples, unit))
        place, half = units.index(largest), len(largest) // 2
        units[place : place + 1] = [largest[:half], largest[half:]]


def _load(samples: Sequence[Sample], part: Sequence[Unit]) -> float:
    return sum(_cost(samples, unit) for unit in part)


def _cost(samples: Sequence[Sample], unit: Unit) -> float:
    """Of a group whose prompt is computed once."""
    shared = min(samples[position].prompt_length for position in unit)
    return text_cost(0, shared) + sum(text_cost(shared, len(samples[position].tokens)) for position in unit)


def text_cost(start: int, end: int, dense: float = DENSE_TOKENS) -> float:
    """Cost of the tokens at positions `start .. end - 1`, in tokens that have no text before them."""
    return (end - start) + (end * (end - 1) - start * (start - 1)) / (2 * dense)


def karmarkar_karp(costs: Sequence[float], num: int) -> list[list[int]]:
    """Cut into `num` parts of nearly equal sums (Karmarkar and Karp 1982, the largest differencing method).

    Two partial solutions with the largest differences are merged, the heavy parts of one with the light parts of the
    other, until one is left.
    """
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for i, cost in enumerate(costs):
        heap.append((-cost, i, [(cost, [i]), *((0.0, []) for _ in range(num - 1))]))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, i, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], i, merged))
    return [sorted(part) for _, part in heap[0][2]] if heap else [[] for _ in range(num)]
