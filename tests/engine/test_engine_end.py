"""Death, close, and callers on several event loops."""

import asyncio
import gc
import threading

import pytest
from engine_cases import PROMPTS, Gate, drive, generate_all, request, start_engine, tiny_policy, together, watched

from limes.engine.protocol import EngineError, FinishReason


def failing_policy(after):
    """A policy whose forward pass fails after some calls."""
    policy = tiny_policy()
    hidden, calls = policy.hidden, []

    def fail(*args):
        calls.append(None)
        if len(calls) > after:
            raise RuntimeError("out of memory: 7 GB wanted")
        return hidden(*args)

    policy.hidden = fail
    return policy


def test_death_reaches_every_call_with_its_cause():
    async def main(engine):
        tasks = [asyncio.ensure_future(engine.generate(request(i, index=i))) for i in range(5)]
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(ended, EngineError)
            assert "out of memory: 7 GB wanted" in str(ended)
            assert isinstance(ended.__cause__, RuntimeError)
        state = await engine.health()
        assert not state.alive
        assert "out of memory" in state.error
        later = [
            engine.generate(request("later")),
            engine.abort(),
            engine.pause("in_place"),
            engine.resume(),
            engine.flush_cache(),
            engine.offload(["kv_cache"]),
            engine.onload(["kv_cache"]),
            engine.set_weight_version(3),
        ]
        for call in later:
            with pytest.raises(EngineError, match="out of memory"):
                await call
        await engine.close()
        await engine.close()

    drive(start_engine(failing_policy(after=3), max_running=2), main)


def test_calls_queued_when_the_engine_dies_get_the_cause_too():
    policy = tiny_policy()
    hold, dying = threading.Event(), threading.Event()

    def die(*args):
        dying.set()
        assert hold.wait(30)
        raise RuntimeError("the device is lost")

    policy.hidden = die

    async def main(engine):
        running = asyncio.ensure_future(engine.generate(request("a")))
        assert await asyncio.to_thread(dying.wait, 30)
        queued = [
            asyncio.ensure_future(call)
            for call in (engine.generate(request("b")), engine.pause("retract"), engine.generate(request("c")))
        ]
        await asyncio.sleep(0)
        hold.set()
        ended = await asyncio.gather(running, *queued, return_exceptions=True)
        assert all(isinstance(e, EngineError) and "the device is lost" in str(e) for e in ended)

    drive(start_engine(policy), main)


def test_close_ends_running_and_waiting_answers_and_the_thread():
    threads = set(threading.enumerate())

    async def main(engine):
        gate = Gate(at=3)
        tasks = [
            asyncio.ensure_future(engine.generate(request(i, index=i), gate if i == 0 else None)) for i in range(4)
        ]
        await gate.here(engine.close())
        results = await asyncio.gather(*tasks)
        assert {r.finish_reason for r in results} == {FinishReason.ABORT}
        assert [len(r.token_ids) for r in results] == [3, 3, 0, 0]
        with pytest.raises(EngineError, match="is closed"):
            await engine.generate(request("late"))
        with pytest.raises(EngineError, match="is closed"):
            await engine.pause("in_place")
        assert not (await engine.health()).alive

    drive(start_engine(max_running=2), main)
    assert set(threading.enumerate()) <= threads


def test_a_closed_engine_holds_no_cache():
    async def main(engine):
        memory = watched(engine._cache)
        await engine.generate(request("a"))
        await engine.close()
        gc.collect()
        assert memory() is None

    drive(start_engine(), main)


def test_a_request_queued_while_the_engine_closes_ends_as_aborted():
    async def main(engine):
        gate = Gate(at=1)
        running = asyncio.ensure_future(engine.generate(request("a"), gate))
        assert await asyncio.to_thread(gate.reached.wait, 30)
        queued = asyncio.ensure_future(engine.generate(request("b")))
        await asyncio.sleep(0)
        await gate.here(engine.close())
        assert (await running).finish_reason is FinishReason.ABORT
        assert (await queued).token_ids == []

    drive(start_engine(), main)


def test_two_event_loops_share_an_engine():
    policy = tiny_policy()
    requests = [request(i, PROMPTS[i % 4], index=i) for i in range(8)]
    expected = [r.token_ids for r in generate_all(start_engine(policy), requests)]
    engine, found = start_engine(policy), {}

    def side(part):
        results = asyncio.run(together(engine, requests[part]))
        found.update((int(r.request_id), r.token_ids) for r in results)

    threads = [threading.Thread(target=side, args=(slice(n, None, 2),)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    asyncio.run(engine.close())
    assert [found[i] for i in range(8)] == expected
