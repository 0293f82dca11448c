"""Whether updates arrive: every weight, bit for bit."""

from __future__ import annotations

from limes.weights.checksum import checksum
from limes.weights.sender import WeightSender
from limes.weights.source import WeightSource


def check_update(sender: WeightSender, source: WeightSource, version: int) -> dict[str, list[str]]:
    """Turn the engines' weights into noise, update them, and compare with what they were.

    Engines must hold the weights of `source` when this is called.

    Returns:
        By engine, the names of weights that differ from before. Empty: the update reaches everything.

    Raises:
        ValueError: the engines' weights are the trainer's own.
        WeightError: see `WeightSender.update`.
    """
    sender.check_weights("snapshot")
    sender.check_weights("scramble")
    sender.update(source, version)
    return sender.check_weights("compare")


def differing_weights(sender: WeightSender, source: WeightSource) -> dict[str, list[str]]:
    """By engine, the names of weights that differ from the trainer's. Nothing is moved: checksums are compared."""
    ours = {name: checksum(tensor) for name, tensor in source.tensors()}
    differing = {
        engine: [name for name, total in ours.items() if theirs[name] != total]
        for engine, theirs in sender.checksums().items()
    }
    return {engine: names for engine, names in differing.items() if names}
