"""Offload and onload, and what must not be read or lost meanwhile."""

import asyncio
import gc

import pytest
import torch
from engine_cases import (
    PROMPTS,
    Gate,
    assert_idle,
    drive,
    generate_all,
    request,
    start_engine,
    tiny_policy,
    together,
    watched,
)

from limes.engine.protocol import EngineError


def test_offload_frees_the_cache_and_onload_brings_the_engine_back():
    async def main(engine):
        memory = watched(engine._cache)
        first = await engine.generate(request("a"))
        assert memory() is not None
        await engine.offload(["kv_cache", "cuda_graph"])
        gc.collect()
        assert memory() is None
        state = await engine.health()
        assert state.resident == {"weights"}
        assert state.kv_tokens_used == 0
        with pytest.raises(EngineError, match=r"cannot generate while \['cuda_graph', 'kv_cache'\] are offloaded"):
            await engine.generate(request("a"))
        await engine.onload(["kv_cache"])
        with pytest.raises(EngineError, match="cuda_graph"):
            await engine.generate(request("a"))
        await engine.onload(["cuda_graph"])
        again = await engine.generate(request("a"))
        assert (again.token_ids, again.log_probs) == (first.token_ids, first.log_probs)

    drive(start_engine(), main)


def test_illegal_moves_are_refused_and_change_nothing():
    async def main(engine):
        async def refused(call, message):
            before = await engine.health()
            with pytest.raises(ValueError, match=message):
                await call
            assert await engine.health() == before

        await refused(engine.onload(["kv_cache"]), r"\['kv_cache'\] are resident already")
        await refused(engine.offload(["kvcache"]), "unknown memory tags .*'kvcache'.*known are")
        await refused(engine.onload(["graphs"]), "unknown memory tags")
        await engine.offload(["kv_cache", "cuda_graph"])
        await refused(engine.offload(["kv_cache"]), r"\['kv_cache'\] are offloaded already")
        await refused(engine.offload(["weights", "kv_cache"]), r"\['kv_cache'\] are offloaded already")
        await refused(engine.onload(["kv_cache", "weights"]), r"\['weights'\] are resident already")
        await refused(engine.onload(["cuda_graph"]), r"\['cuda_graph'\] while \['kv_cache'\] are offloaded")
        await engine.offload(["weights"])
        await refused(engine.onload(["cuda_graph", "kv_cache"]), r"\['cuda_graph'\] while \['weights'\]")
        await engine.onload(["weights"])
        await engine.onload(["kv_cache", "cuda_graph"])
        await engine.offload([])
        await engine.onload([])
        gate = Gate(at=1)
        task = asyncio.ensure_future(engine.generate(request("a"), gate))
        with pytest.raises(ValueError, match=r"cannot offload \['kv_cache'\] while 1 answers are in flight"):
            await gate.here(engine.offload(["kv_cache"]))
        assert len((await task).token_ids) == 12

    drive(start_engine(), main)


def test_a_hundred_offloads_right_after_the_last_token_change_neither_answers_nor_weights():
    policy = tiny_policy()

    def checksum():
        return [p.detach().double().sum().item() for p in policy.model.parameters()]

    async def main(engine):
        weights, answers = checksum(), set()
        for cycle in range(100):
            answers.add(tuple((await engine.generate(request(cycle, max_new_tokens=2))).token_ids))
            await engine.offload(["kv_cache", "cuda_graph"])
            await engine.onload(["kv_cache"])
            await engine.onload(["cuda_graph"])
        assert len(answers) == 1
        assert checksum() == weights
        await assert_idle(engine)

    drive(start_engine(policy, kv_cache_tokens=64), main)


def test_ten_pauses_leave_the_weights_alone():
    policy = tiny_policy()
    before = [p.detach().clone() for p in policy.model.parameters()]

    async def main(engine):
        task = asyncio.ensure_future(engine.generate(request("a", max_new_tokens=200)))
        for mode in ["in_place", "retract"] * 5:
            await engine.pause(mode)
            assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))
            await engine.resume()
        return await task

    interrupted = drive(start_engine(policy), main)
    assert interrupted.token_ids == generate_all(start_engine(policy), [request("b", max_new_tokens=200)])[0].token_ids


def test_padding_never_reads_what_was_never_written():
    """A cache full of NaN, as fresh memory may be, with prompts and answers of unequal lengths."""
    requests = [request(i, PROMPTS[i % 4], index=i, max_new_tokens=3 + i) for i in range(8)]
    policy = tiny_policy()
    expected = generate_all(start_engine(policy), requests)

    async def main(engine):
        engine._cache.layers.fill_(torch.nan)
        engine._scheduler.pool._free.reverse()  # page 0 comes last
        return await together(engine, requests)

    for a, b in zip(expected, drive(start_engine(policy, prefill_chunk=3), main), strict=True):
        assert a.token_ids == b.token_ids
        assert b.log_probs == pytest.approx(a.log_probs, abs=1e-5)
