"""Abort, cancel, pause, offload, death and close, at known points of an answer."""

import asyncio
import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from engine_cases import PROMPTS, Gate, drive, generate_all, request, start_engine, tiny_policy, together

from limes.engine.protocol import EngineError, FinishReason, RequestRefused


async def health_when(engine, holds):
    """The engine's state once `holds(state)`."""
    while not holds(state := await engine.health()):
        await asyncio.sleep(0.001)
    return state


async def assert_idle(engine):
    state = await engine.health()
    assert (state.num_running, state.num_waiting, state.kv_tokens_used) == (0, 0, 0)


def test_abort_of_running_waiting_and_unknown_answers():
    async def main(engine):
        gate = Gate(at=3)
        running = asyncio.ensure_future(engine.generate(request("running", max_new_tokens=50), gate))
        waiting = asyncio.ensure_future(engine.generate(request("waiting", max_new_tokens=50)))
        kept = asyncio.ensure_future(engine.generate(request("kept", index=2, max_new_tokens=5)))
        await gate.here(engine.abort(["running", "waiting", "running", "unknown"]))
        results = [await running, await waiting]
        assert [r.finish_reason for r in results] == [FinishReason.ABORT] * 2
        assert [len(r.token_ids) for r in results] == [3, 0]
        assert all(len(r.token_ids) == len(r.log_probs) == len(r.weight_versions) for r in results)
        assert len((await kept).token_ids) == 5
        await engine.abort(["running"])
        await engine.abort([])
        await engine.abort()
        await assert_idle(engine)
        return results[0].token_ids

    partial = drive(start_engine(max_running=1), main)
    whole = generate_all(start_engine(), [request("x", max_new_tokens=50)])[0]
    assert partial == whole.token_ids[:3]


def test_abort_of_all_ends_everything():
    async def main(engine):
        gate = Gate(at=2)
        tasks = [
            asyncio.ensure_future(engine.generate(request(i, index=i), gate if i == 0 else None)) for i in range(9)
        ]
        await gate.here(engine.abort())
        results = await asyncio.gather(*tasks)
        assert {r.finish_reason for r in results} == {FinishReason.ABORT}
        await assert_idle(engine)

    drive(start_engine(max_running=4), main)


def test_abort_while_a_prompt_is_being_computed_leaves_the_prompts_that_share_it_right():
    policy = tiny_policy()
    shared = list(range(10, 42))
    prompts = [[*shared, 5], [*shared, 6]]
    alone = generate_all(start_engine(policy), [request("alone", prompts[1])])[0]

    async def main(engine):
        gate = Gate(at=2)  # of an answer that decodes while the long prompts are computed, four tokens a step
        ticking = asyncio.ensure_future(engine.generate(request("tick", PROMPTS[3]), gate))
        first = asyncio.ensure_future(engine.generate(request("first", prompts[0])))
        second = asyncio.ensure_future(engine.generate(request("second", prompts[1])))
        await gate.here(engine.abort(["first"]))
        assert (await first).token_ids == []
        assert (await second).token_ids == alone.token_ids
        assert (await second).log_probs == pytest.approx(alone.log_probs, abs=1e-5)
        await ticking
        await assert_idle(engine)
        assert engine.counters.num_shared_tokens == 32

    drive(start_engine(policy, prefill_chunk=4), main)


def test_cancelling_a_call_ends_its_answer():
    async def main(engine):
        gate = Gate(at=2)
        task = asyncio.ensure_future(engine.generate(request("a", max_new_tokens=200), gate))

        async def cancel():
            task.cancel()

        await gate.here(cancel())
        with pytest.raises(asyncio.CancelledError):
            await task
        await assert_idle(engine)
        assert engine.counters.num_sampled_tokens < 200
        assert len((await engine.generate(request("a"))).token_ids) == 12

    drive(start_engine(), main)


def test_cancelling_a_refused_copy_leaves_the_running_answer_alone():
    async def main(engine):
        gate = Gate(at=2)
        task = asyncio.ensure_future(engine.generate(request("a"), gate))
        assert await asyncio.to_thread(gate.reached.wait, 30)
        copy = asyncio.ensure_future(engine.generate(request("a", index=1)))
        await asyncio.sleep(0)
        copy.cancel()
        await gate.here()
        with pytest.raises(asyncio.CancelledError):
            await copy
        assert (await task).finish_reason is FinishReason.LENGTH

    drive(start_engine(), main)


def test_cancelling_while_the_engine_closes_is_still_a_cancellation():
    async def main(engine):
        gate = Gate(at=2)
        task = asyncio.ensure_future(engine.generate(request("a", max_new_tokens=200), gate))
        assert await asyncio.to_thread(gate.reached.wait, 30)
        closing = asyncio.ensure_future(engine.close())
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0)
        gate.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await closing

    drive(start_engine(), main)


def test_a_second_request_with_a_running_id_is_refused():
    async def main(engine):
        gate = Gate(at=1)
        task = asyncio.ensure_future(engine.generate(request("a"), gate))
        with pytest.raises(ValueError, match="'a' is already running"):
            await gate.here(engine.generate(request("a", index=5)))
        assert len((await task).token_ids) == 12
        assert len((await engine.generate(request("a"))).token_ids) == 12

    drive(start_engine(), main)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_and_resume_change_no_token(mode):
    requests = [request(i, PROMPTS[i % 2], index=i, max_new_tokens=20) for i in range(5)]
    policy = tiny_policy()
    straight = generate_all(start_engine(policy, max_running=3), requests)

    async def main(engine):
        gate = Gate(at=6)
        tasks = [asyncio.ensure_future(engine.generate(r, gate if i == 0 else None)) for i, r in enumerate(requests)]
        await gate.here(engine.pause(mode))
        state = await engine.health()
        assert state.paused
        assert (state.num_running, state.num_waiting) == ((3, 2) if mode == "in_place" else (0, 5))
        before = engine.counters.num_prefill_tokens
        sampled = engine.counters.num_sampled_tokens
        await asyncio.sleep(0.02)
        assert engine.counters.num_sampled_tokens == sampled
        await engine.resume()
        results = await asyncio.gather(*tasks)
        recomputed = engine.counters.num_prefill_tokens - before
        assert recomputed == (0 if mode == "in_place" else 3 * 6)
        await assert_idle(engine)
        return results

    for a, b in zip(straight, drive(start_engine(policy, max_running=3), main), strict=True):
        assert a.token_ids == b.token_ids
        assert b.log_probs == pytest.approx(a.log_probs, abs=0 if mode == "in_place" else 1e-5)


def test_pause_abort_returns_what_there_is():
    async def main(engine):
        gate = Gate(at=4)
        tasks = [
            asyncio.ensure_future(engine.generate(request(i, index=i), gate if i == 0 else None)) for i in range(3)
        ]
        await gate.here(engine.pause("abort"))
        results = await asyncio.gather(*tasks)
        assert [r.finish_reason for r in results] == [FinishReason.ABORT] * 3
        assert [len(r.token_ids) for r in results] == [4, 4, 0]
        late = asyncio.ensure_future(engine.generate(request("late")))
        await health_when(engine, lambda state: state.num_waiting == 1)
        await engine.resume()
        assert len((await late).token_ids) == 12

    drive(start_engine(max_running=2), main)


def test_paused_engines_still_abort_cancel_and_close():
    async def main(engine):
        await engine.pause("in_place")
        await engine.pause("in_place")
        task = asyncio.ensure_future(engine.generate(request("a")))
        other = asyncio.ensure_future(engine.generate(request("b")))
        last = asyncio.ensure_future(engine.generate(request("c")))
        await health_when(engine, lambda state: state.num_waiting == 3)
        await engine.abort(["a"])
        assert (await task).finish_reason is FinishReason.ABORT
        other.cancel()
        with pytest.raises(asyncio.CancelledError):
            await other
        await engine.close()
        assert (await last).finish_reason is FinishReason.ABORT

    drive(start_engine(), main)


def test_an_unknown_pause_mode_is_refused_and_pauses_nothing():
    async def main(engine):
        with pytest.raises(ValueError, match="unknown pause mode 'later'"):
            await engine.pause("later")
        assert not (await engine.health()).paused

    drive(start_engine(), main)


def test_requests_join_while_others_run():
    policy = tiny_policy()
    requests = [request(i, PROMPTS[i % 4], index=i, max_new_tokens=15) for i in range(8)]
    alone = [generate_all(start_engine(policy), [r])[0].token_ids for r in requests]

    async def main(engine):
        tasks = []
        for one in requests:
            gate = Gate(at=2)
            tasks.append(asyncio.ensure_future(engine.generate(one, gate)))
            await gate.here()
        return [(await task).token_ids for task in tasks]

    assert drive(start_engine(policy), main) == alone


def test_a_group_larger_than_the_batch():
    results = generate_all(start_engine(max_running=6), [request(i, index=i, max_new_tokens=4) for i in range(40)])
    assert all(len(r.token_ids) == 4 for r in results)
    assert len({tuple(r.token_ids) for r in results}) > 30


def test_on_token_sees_every_token_in_order():
    seen = []

    async def main(engine):
        return await engine.generate(request("a"), lambda token, log_prob: seen.append((token, log_prob)))

    result = drive(start_engine(), main)
    assert seen == list(zip(result.token_ids, result.log_probs, strict=True))


def test_a_failing_listener_costs_its_own_answer_alone():
    def listen(token, log_prob):
        raise BrokenPipeError("the reader has gone")

    async def main(engine):
        listened = asyncio.ensure_future(engine.generate(request("a"), listen))
        other = asyncio.ensure_future(engine.generate(request("b", index=1)))
        with pytest.raises(BrokenPipeError, match="the reader has gone"):
            await listened
        assert len((await other).token_ids) == 12
        await assert_idle(engine)

    drive(start_engine(), main)


def test_weights_that_are_not_finite_cost_the_answers_and_not_the_engine():
    policy = tiny_policy()

    async def main(engine):
        weight = policy.model.base_model.norm.weight
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.fill_(torch.nan)
        with pytest.raises(EngineError, match="no finite logits for token 0"):
            await engine.generate(request("a"))
        with torch.no_grad():
            weight.copy_(kept)
        await engine.set_weight_version(1)
        assert len((await engine.generate(request("a"))).token_ids) == 12
        await assert_idle(engine)

    drive(start_engine(policy), main)


REFUSED = [
    ({"prompt": [3, 999]}, "prompt_ids hold 999, the model knows ids 0 .. 101"),
    ({"prompt": [-1]}, "prompt_ids hold -1"),
    ({"prompt": []}, "needs a prompt token"),
    ({"stop_token_ids": (102,)}, "stop_token_ids hold 102"),
    ({"max_new_tokens": 0}, "a new token, got 10 and 0"),
    ({"max_new_tokens": 247}, "= 257 exceeds the context of 256"),
    ({"temperature": -0.1}, "temperature = -0.1"),
    ({"temperature": float("nan")}, "temperature = nan"),
    ({"temperature": float("inf")}, "temperature = inf"),
    ({"top_p": 0.0}, "top_p = 0.0"),
    ({"top_p": 1.5}, "top_p = 1.5"),
    ({"top_k": 0}, "top_k = 0"),
    ({"top_k": -2}, "top_k = -2"),
    ({"min_p": 1.1}, "min_p = 1.1"),
    ({"min_new_tokens": -1}, "min_new_tokens = -1"),
    ({"stop": "end"}, "stop = 'end'"),
    ({"stop": ("",)}, "stop = "),
    ({"first_position": -1}, "first_position = -1"),
    ({"first_position": 10}, "first_position = 10 of a prompt of 10"),
]


def test_bad_requests_are_refused_by_value_and_harm_nobody():
    async def main(engine):
        for options, message in REFUSED:
            with pytest.raises(RequestRefused, match=message):
                await engine.generate(request("bad", **options))
        with pytest.raises(TypeError):
            await engine.generate(request("bad", [3, 4.5]))
        huge = await engine.generate(request("huge", seed=-(2**80), index=2**64 - 1))
        assert len(huge.token_ids) == 12

    drive(start_engine(), main)


def test_the_prompt_is_taken_when_the_call_is_made():
    policy = tiny_policy()
    expected = generate_all(start_engine(policy), [request("a", [5, 9, 9, 4])])[0].token_ids

    async def main(engine):
        await engine.pause("in_place")
        prompt = [5, 9, 9, 4]
        task = asyncio.ensure_future(engine.generate(request("a", prompt)))
        await health_when(engine, lambda state: state.num_waiting == 1)
        prompt[:] = [7] * 20
        await engine.resume()
        assert (await task).token_ids == expected

    drive(start_engine(policy), main)


def watched(cache, name):
    """Put a tensor of the cache on memory whose end can be seen, and return a reference that dies with it."""
    memory = np.zeros(getattr(cache, name).shape, dtype=np.float32)
    setattr(cache, name, torch.from_numpy(memory))
    return weakref.ref(memory)


def test_offload_frees_the_cache_and_onload_brings_the_engine_back():
    async def main(engine):
        memory = [watched(engine._cache, name) for name in ("keys", "values")]
        first = await engine.generate(request("a"))
        assert all(ref() is not None for ref in memory)
        await engine.offload(["kv_cache", "cuda_graph"])
        gc.collect()
        assert all(ref() is None for ref in memory)
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
        engine._cache.keys.fill_(torch.nan)
        engine._cache.values.fill_(torch.nan)
        engine._scheduler.pool._free.reverse()  # page 0 comes last
        return await together(engine, requests)

    for a, b in zip(expected, drive(start_engine(policy, prefill_chunk=3), main), strict=True):
        assert a.token_ids == b.token_ids
        assert b.log_probs == pytest.approx(a.log_probs, abs=1e-5)


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
        memory = [watched(engine._cache, name) for name in ("keys", "values")]
        await engine.generate(request("a"))
        await engine.close()
        gc.collect()
        assert all(ref() is None for ref in memory)

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
