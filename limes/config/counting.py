"""Numbers in sentences."""

from __future__ import annotations


def num_of(number: int, noun: str) -> str:
    """A number with what it counts: `1 rollout`, `2 rollouts`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
