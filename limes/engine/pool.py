"""Several engines as one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from limes.engine.protocol import Engine, EngineHealth, GenerateRequest, GenerateResult, OnToken, PauseMode

T = TypeVar("T")


@dataclass(slots=True)
class _Home:
    """The engine that a prompt's answers go to while some are in flight."""

    engine: int
    num_running: int = 0


class EnginePool:
    """See `Engine`. Answers to one prompt go to one engine, which then computes the prompt once; a prompt goes to the
    engine with the fewest answers in flight, the first of several.

    Args:
        engines: at least one; all with the same weights.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        assert engines, "a pool of no engines"
        self.engines = list(engines)
        self._num_running = [0] * len(engines)
        self._homes: dict[tuple[int, ...], _Home] = {}

    async def generate(self, request: GenerateRequest, on_token: OnToken | None = None) -> GenerateResult:
        """See `Engine.generate`."""
        # answers that go on with tokens of their own have left their group's common prompt behind
        num_prompt = len(request.prompt_ids) - request.first_position
        prompt = tuple(request.prompt_ids[:num_prompt])
        home = self._homes.setdefault(prompt, _Home(self._num_running.index(min(self._num_running))))
        home.num_running += 1
        self._num_running[home.engine] += 1
        try:
            return await self.engines[home.engine].generate(request, on_token)
        finally:
            self._num_running[home.engine] -= 1
            home.num_running -= 1
            if not home.num_running:
                del self._homes[prompt]

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """See `Engine.abort`."""
        names = None if request_ids is None else list(request_ids)
        await all_of(engine.abort(names) for engine in self.engines)

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`."""
        await all_of(engine.pause(mode) for engine in self.engines)

    async def resume(self) -> None:
        """See `Engine.resume`."""
        await all_of(engine.resume() for engine in self.engines)

    async def flush_cache(self) -> None:
        """See `Engine.flush_cache`."""
        await all_of(engine.flush_cache() for engine in self.engines)

    async def offload(self, tags: Iterable[str]) -> None:
        """See `Engine.offload`."""
        names = list(tags)
        await all_of(engine.offload(names) for engine in self.engines)

    async def onload(self, tags: Iterable[str]) -> None:
        """See `Engine.onload`."""
        names = list(tags)
        await all_of(engine.onload(names) for engine in self.engines)

    async def weight_version(self) -> int:
        """The oldest version that any of them samples with."""
        return min(await all_of(engine.weight_version() for engine in self.engines))

    async def health(self) -> EngineHealth:
        """Alive if all are; numbers add up; resident is what all have; errors say which engine."""
        states = await all_of(engine.health() for engine in self.engines)
        errors = [f"engine {i}: {state.error}" for i, state in enumerate(states) if state.error is not None]
        return EngineHealth(
            alive=all(state.alive for state in states),
            paused=any(state.paused for state in states),
            num_running=sum(state.num_running for state in states),
            num_waiting=sum(state.num_waiting for state in states),
            kv_tokens_used=sum(state.kv_tokens_used for state in states),
            kv_tokens_total=sum(state.kv_tokens_total for state in states),
            resident=frozenset.intersection(*(state.resident for state in states)),
            weight_version=min(state.weight_version for state in states),
            error="; ".join(errors) or None,
        )

    async def close(self) -> None:
        """See `Engine.close`."""
        await all_of(engine.close() for engine in self.engines)


async def all_of(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Wait for all, then raise the first error, if there is one."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    found: list[T] = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        found.append(outcome)
    return found
