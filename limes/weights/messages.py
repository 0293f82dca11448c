"""What the trainer tells every engine, whatever the transport; each transport has more of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from limes.weights.receiver import CheckAction, EngineState, WeightReceiver


class Message(Protocol):
    """What travels to an engine: small and picklable."""

    def apply(self, receiver: WeightReceiver) -> Any:
        """Carry it out in the engine's process; what it returns or raises goes back."""
        ...


@dataclass(frozen=True, slots=True)
class Describe:
    """What weights are there?"""

    def apply(self, receiver: WeightReceiver) -> EngineState:
        """See `Message.apply`."""
        return receiver.state()


@dataclass(frozen=True, slots=True)
class Begin:
    """Stop sampling: an update starts."""

    version: int

    def apply(self, receiver: WeightReceiver) -> None:
        """See `Message.apply`."""
        receiver.begin(self.version)


@dataclass(frozen=True, slots=True)
class Finish:
    """The update is whole: forget cached prefixes and go on sampling."""

    version: int

    def apply(self, receiver: WeightReceiver) -> None:
        """See `Message.apply`."""
        receiver.finish(self.version)


@dataclass(frozen=True, slots=True)
class Abandon:
    """The update will not end: go on sampling if the old weights are whole."""

    def apply(self, receiver: WeightReceiver) -> bool:
        """See `Message.apply`."""
        return receiver.abandon()


@dataclass(frozen=True, slots=True)
class CheckWeights:
    """See `WeightReceiver.check_weights`."""

    action: CheckAction

    def apply(self, receiver: WeightReceiver) -> list[str]:
        """See `Message.apply`."""
        return receiver.check_weights(self.action)


@dataclass(frozen=True, slots=True)
class Checksums:
    """See `WeightReceiver.checksums`."""

    def apply(self, receiver: WeightReceiver) -> dict[str, int]:
        """See `Message.apply`."""
        return receiver.checksums()


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Let go of what a transport keeps."""

    def apply(self, receiver: WeightReceiver) -> None:
        """See `Message.apply`."""
        receiver.set_link(None)
