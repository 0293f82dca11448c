"""Control calls in any order and at any time: every call returns, no token changes, nothing is left behind."""

import asyncio

import torch
from engine_cases import PROMPTS, drive, generate_all, request, start_engine, tiny_policy
from hypothesis import given, settings
from hypothesis import strategies as st

from limes.engine.protocol import FinishReason

POLICY = tiny_policy(dtype=torch.float64)
REQUESTS = [request(i, PROMPTS[i % 4], index=i, max_new_tokens=4 + 3 * (i % 5)) for i in range(10)]
EXPECTED: list = []

CALLS = st.one_of(
    st.tuples(st.just("generate"), st.integers(0, 9)),
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("pause"), st.sampled_from(["in_place", "retract", "abort"])),
    st.tuples(st.sampled_from(["resume", "flush", "update", "offload", "abort_all"]), st.none()),
    st.tuples(st.just("wait"), st.integers(1, 4)),
)


def expected():
    if not EXPECTED:
        EXPECTED.extend(r.token_ids for r in generate_all(start_engine(POLICY), REQUESTS))
    return EXPECTED


class Driver:
    def __init__(self, engine):
        self.engine, self.tasks, self.version = engine, {}, 0

    async def call(self, name, value):
        engine = self.engine
        if name == "generate" and (value not in self.tasks or self.tasks[value].done()):
            self.check(value)
            self.tasks[value] = asyncio.ensure_future(engine.generate(REQUESTS[value]))
            await asyncio.sleep(0)  # it is queued before the next call
        elif name == "abort":
            await engine.abort([str(value)])
        elif name == "abort_all":
            await engine.abort()
        elif name == "cancel" and value in self.tasks:
            self.tasks[value].cancel()
            await asyncio.gather(self.tasks.pop(value), return_exceptions=True)
        elif name == "pause":
            await engine.pause(value)
        elif name == "resume":
            await engine.resume()
        elif name == "flush":
            await engine.flush_cache()
        elif name == "update":
            self.version += 1
            await engine.set_weight_version(self.version)
        elif name == "offload":
            try:
                await engine.offload(["kv_cache", "cuda_graph"])
            except ValueError:
                assert (await engine.health()).resident == {"weights", "kv_cache", "cuda_graph"}
            else:
                await engine.onload(["kv_cache", "cuda_graph"])
        elif name == "wait":
            await asyncio.sleep(value / 1000)

    def check(self, number):
        if number not in self.tasks:
            return
        result, whole = self.tasks.pop(number).result(), expected()[number]
        assert result.token_ids == whole[: len(result.token_ids)]
        assert len(result.token_ids) == len(result.log_probs) == len(result.weight_versions)
        assert result.weight_versions == sorted(result.weight_versions)
        if result.finish_reason is not FinishReason.ABORT:
            assert result.token_ids == whole

    async def end(self):
        await self.engine.resume()
        await asyncio.gather(*self.tasks.values())
        for number in list(self.tasks):
            self.check(number)
        state = await self.engine.health()
        for _ in range(4000):  # a prompt that others may share is computed to its end when its answers are gone
            if not state.alive or state.kv_tokens_used == 0:
                break
            await asyncio.sleep(0.005)
            state = await self.engine.health()
        assert state.alive
        assert (state.num_running, state.num_waiting, state.kv_tokens_used) == (0, 0, 0)


@settings(max_examples=25, deadline=None)
@given(
    calls=st.lists(CALLS, min_size=3, max_size=40),
    kv_cache_tokens=st.sampled_from([40, 72, 512]),
    max_running=st.integers(1, 5),
    prefill_chunk=st.sampled_from([2, 5, 64]),
)
def test_any_order_of_calls(calls, **sizes):
    expected()

    async def main(engine):
        driver = Driver(engine)
        for name, value in calls:
            await driver.call(name, value)
        await driver.end()

    drive(start_engine(POLICY, **sizes), main)
