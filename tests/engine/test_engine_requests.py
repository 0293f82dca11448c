"""Requests that must not reach the engine's thread."""

import asyncio

import pytest
from engine_cases import drive, generate_all, health_when, request, start_engine, tiny_policy

from limes.engine.protocol import RequestRefused

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
