"""An engine that takes updates: it stands still while they come in, and nothing it cached outlives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

from limes.weights.messages import Abandon, Begin, Finish, Message
from limes.weights.receiver import WeightReceiver

PauseMode = Literal["abort", "retract", "in_place"]


class UpdatableEngine(Protocol):
    """What an engine needs for updates of its own module; the embedded engine has it."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling."""
        ...

    async def resume(self) -> None:
        """Go on sampling."""
        ...

    async def set_weight_version(self, version: int) -> None:
        """New tokens carry this version, and no cached prefix is used again."""
        ...

    async def run(self, work: Callable[[], Any]) -> Any:
        """Run tensor work where the engine computes."""
        ...


class EngineWeights:
    """Carries out the trainer's messages between an engine's steps.

    The engine pauses when an update begins. It goes on when the update is whole, or when it failed before it touched a
    weight; after one that broke off midway it stands still until another is whole.

    Args:
        engine: samples with the receiver's module.
        pause_mode: what happens to running answers, see `Engine.pause`.
    """

    def __init__(self, engine: UpdatableEngine, receiver: WeightReceiver, *, pause_mode: PauseMode) -> None:
        self.engine, self.receiver, self.pause_mode = engine, receiver, pause_mode

    async def handle(self, message: Message) -> Any:
        """Carry out one message; see `WeightReceiver.handle`."""
        if isinstance(message, Begin):
            await self.engine.pause(self.pause_mode)
        answer = await self.engine.run(lambda: self.receiver.handle(message))
        if isinstance(message, Finish):
            await self.engine.set_weight_version(message.version)
            await self.engine.resume()
        elif isinstance(message, Abandon) and answer:
            await self.engine.resume()
        return answer
