"""Engines, requests and a gate that several engine tests share."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
import torch
from tiny import tiny_model, tiny_tokenizer

from limes.engine.embedded.engine import EmbeddedEngine
from limes.engine.embedded.kv_cache import KVCache
from limes.engine.protocol import EngineHealth, GenerateRequest, GenerateResult, SampleKey, SamplingParams
from limes.models.policy import Policy, make_policy

PROMPTS = [[3, 10, 11, 12, 13, 14, 15, 16, 17, 4], [3, 10, 11, 12, 13, 20, 4], [5, 9, 9, 4], [3, 40, 4]]
END = 2
DEADLINE_S = 60.0


def tiny_policy(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> Policy:
    """One layer, and no end token, so that answers have the length that was asked for."""
    policy = make_policy(tiny_model(num_layers=1, hidden_size=16, seed=seed, dtype=dtype), tiny_tokenizer())
    policy.end_token_ids = ()
    return policy


def start_engine(policy: Policy | None = None, **options: Any) -> EmbeddedEngine:
    """A small engine on a tiny policy."""
    return EmbeddedEngine(policy or tiny_policy(), **({"kv_cache_tokens": 1024, "page_size": 4} | options))


def request(
    name: object,
    prompt: list[int] | None = None,
    *,
    seed: int = 0,
    rollout: int = 0,
    index: int = 0,
    first_position: int = 0,
    **sampling: Any,
) -> GenerateRequest:
    """An answer of 12 tokens, unless told otherwise."""
    params = SamplingParams(**({"max_new_tokens": 12} | sampling))
    return GenerateRequest(
        str(name), PROMPTS[0] if prompt is None else prompt, params, SampleKey(seed, rollout, index), first_position
    )


def drive(engine: EmbeddedEngine, main: Callable[[EmbeddedEngine], Awaitable[Any]]) -> Any:
    """Run `main(engine)` on an event loop of its own within a deadline, and close the engine."""

    async def run() -> Any:
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await main(engine)
        finally:
            await asyncio.wait_for(engine.close(), DEADLINE_S)

    return asyncio.run(run())


def generate_all(engine: EmbeddedEngine, requests: list[GenerateRequest]) -> list[GenerateResult]:
    """All answers together; the engine is closed afterwards."""
    return drive(engine, lambda e: together(e, requests))


async def together(engine: EmbeddedEngine, requests: list[GenerateRequest]) -> list[GenerateResult]:
    """All answers together."""
    return await asyncio.gather(*(engine.generate(r) for r in requests))


class Gate:
    """Holds the engine's thread at the `at`-th token of an answer; pass it as `on_token`."""

    def __init__(self, at: int) -> None:
        self.at, self.num = at, 0
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, token_id: int, log_prob: float) -> None:
        self.num += 1
        if self.num == self.at:
            self.reached.set()
            assert self.opened.wait(DEADLINE_S)

    async def here(self, *calls: Coroutine[Any, Any, Any]) -> list[Any]:
        """Queue the calls while the engine is held, so that they run right after the present step; await them."""
        assert await asyncio.to_thread(self.reached.wait, DEADLINE_S)
        tasks = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0)
        self.opened.set()
        return await asyncio.gather(*tasks)


async def health_when(engine: EmbeddedEngine, holds: Callable[[EngineHealth], bool]) -> EngineHealth:
    """The engine's state once `holds(state)`."""
    while not holds(state := await engine.health()):
        await asyncio.sleep(0.001)
    return state


async def assert_idle(engine: EmbeddedEngine) -> None:
    """Nothing runs, waits or holds a page."""
    state = await engine.health()
    assert (state.num_running, state.num_waiting, state.kv_tokens_used) == (0, 0, 0)


def watched(cache: KVCache) -> weakref.ref[np.ndarray]:
    """Put the cache's tensor on memory whose end can be seen, and return a reference that dies with it."""
    memory = np.zeros(cache.layers.shape, dtype=np.float32)
    cache.layers = torch.from_numpy(memory)
    return weakref.ref(memory)


def full_log_probs(policy: Policy, request: GenerateRequest, result: GenerateResult) -> list[float]:
    """Log-probs of an answer from one plain causal forward pass over the whole sequence."""
    from limes.records import Sample
    from limes.training.forward import PackedForward

    sample = Sample(index=0, group_index=0, tokens=list(request.prompt_ids))
    sample.append_tokens(result.token_ids, log_probs=result.log_probs, weight_versions=result.weight_versions)
    forward = PackedForward(policy, temperature=request.sampling.temperature or 1.0, head_chunk=7)
    with torch.no_grad():
        return forward([sample]).log_probs.tolist()
