"""Abort, cancel, pause and joining, at known points of an answer."""

import asyncio

import pytest
import torch
from engine_cases import (
    PROMPTS,
    Gate,
    assert_idle,
    drive,
    generate_all,
    health_when,
    request,
    start_engine,
    tiny_policy,
)

from limes.engine.protocol import EngineError, FinishReason


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
