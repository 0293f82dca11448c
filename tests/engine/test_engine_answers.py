"""What an answer holds: where it ends, how it goes on after an interruption, and what it never depends on."""

import asyncio

import pytest
import torch
from engine_cases import PROMPTS, Gate, drive, generate_all, request, start_engine, tiny_policy
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_tokenizer

from limes.engine.protocol import FinishReason, SamplingParams

POLICY = tiny_policy(dtype=torch.float64)  # roundings that differ by batch would move a token over an edge
LONG = 40


def generate(one, **options):
    return generate_all(start_engine(POLICY, **options), [one])[0]


def test_stop_ids_end_an_answer_and_stay_in_it():
    whole = generate(request("a", max_new_tokens=LONG)).token_ids
    stop = whole[10]
    num = whole.index(stop) + 1
    result = generate(request("a", max_new_tokens=LONG, stop_token_ids=(stop,)))
    assert (result.token_ids, result.finish_reason) == (whole[:num], FinishReason.STOP)
    exact = generate(request("a", max_new_tokens=num, stop_token_ids=(stop,)))
    assert (exact.token_ids, exact.finish_reason) == (whole[:num], FinishReason.STOP)
    short = generate(request("a", max_new_tokens=num - 1, stop_token_ids=(stop,)))
    assert (short.token_ids, short.finish_reason) == (whole[: num - 1], FinishReason.LENGTH)


def test_end_tokens_of_the_model_end_an_answer():
    policy = tiny_policy(dtype=torch.float64)
    whole = generate(request("a", max_new_tokens=LONG)).token_ids
    policy.end_token_ids = (whole[7],)
    result = generate_all(start_engine(policy), [request("a", max_new_tokens=LONG)])[0]
    assert result.token_ids == whole[: whole.index(whole[7]) + 1]
    assert result.finish_reason is FinishReason.STOP


def test_stop_strings_end_an_answer_and_stay_in_it():
    whole = generate(request("a", max_new_tokens=LONG)).token_ids
    text = [tiny_tokenizer().decode([token]) for token in whole]
    stop = "".join(text[10:13])
    num = next(n for n in range(1, LONG + 1) if stop in "".join(text[:n]))
    result = generate(request("a", max_new_tokens=LONG, stop=("never there", stop)))
    assert (result.token_ids, result.finish_reason) == (whole[:num], FinishReason.STOP)


def test_no_end_token_is_drawn_before_the_least_length():
    """A third of all tokens end the answer."""
    ends = tuple(range(0, 102, 3))
    requests = [request(i, index=i, min_new_tokens=6, stop_token_ids=ends, max_new_tokens=30) for i in range(30)]
    results = generate_all(start_engine(POLICY), requests)
    for result in results:
        assert len(result.token_ids) > 6
        assert not set(result.token_ids[:-1]) & set(ends)
    assert any(r.finish_reason is FinishReason.STOP for r in results)


def test_a_resumed_answer_equals_the_uninterrupted_one():
    for sampling in ({}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 5}):
        whole = generate(request("a", index=3, max_new_tokens=20, **sampling))
        for done in (1, 7, 19):
            resumed = generate(
                request(
                    "a",
                    [*PROMPTS[0], *whole.token_ids[:done]],
                    index=3,
                    max_new_tokens=20 - done,
                    first_position=done,
                    **sampling,
                )
            )
            assert resumed.token_ids == whole.token_ids[done:]
            assert resumed.log_probs == pytest.approx(whole.log_probs[done:], abs=1e-5)
            assert resumed.finish_reason is whole.finish_reason


def test_a_resumed_answer_completes_a_stop_string_that_began_before():
    whole = generate(request("a", max_new_tokens=LONG)).token_ids
    stop = tiny_tokenizer().decode(whole[10:13])
    for done in (11, 12):
        resumed = generate(
            request("a", [*PROMPTS[0], *whole[:done]], max_new_tokens=LONG - done, first_position=done, stop=(stop,))
        )
        assert resumed.token_ids == whole[done:13]
        assert resumed.finish_reason is FinishReason.STOP


def test_a_resumed_answer_keeps_what_is_left_of_its_least_length():
    ends = tuple(range(0, 102, 2))
    for index in range(10):
        resumed = generate(
            request(
                "a",
                [*PROMPTS[0], 5, 7, 9, 11],
                index=index,
                first_position=4,
                min_new_tokens=3,
                stop_token_ids=ends,
                max_new_tokens=30,
            )
        )
        assert len(resumed.token_ids) > 3
        assert not set(resumed.token_ids[:-1]) & set(ends)


def test_the_noise_of_an_answer_is_its_own():
    base = generate(request("a", seed=1, rollout=2, index=3)).token_ids
    assert generate(request("other name", seed=1, rollout=2, index=3)).token_ids == base
    for word in ("seed", "rollout", "index"):
        other = {"seed": 1, "rollout": 2, "index": 3} | {word: 9}
        assert generate(request("a", **other)).token_ids != base


PREFIXES = [[], [7], [7, 8, 9, 10, 11, 12], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]]
PROMPT = st.builds(
    lambda prefix, tail: prefix + tail, st.sampled_from(PREFIXES), st.lists(st.integers(20, 22), min_size=1, max_size=5)
)
ALONE: dict = {}


def alone(one):
    key = (tuple(one.prompt_ids), one.sampling, one.key)
    if key not in ALONE:
        ALONE[key] = generate(one)
    return ALONE[key]


@settings(max_examples=25, deadline=None)
@given(
    mix=st.lists(st.tuples(PROMPT, st.integers(1, 3), st.integers(1, 14)), min_size=1, max_size=5),
    kv_cache_tokens=st.integers(32, 128),
    page_size=st.sampled_from([1, 2, 4, 16]),
    max_running=st.integers(1, 8),
    prefill_chunk=st.integers(1, 40),
)
def test_answers_do_not_depend_on_company_pages_or_pieces(mix, **sizes):
    requests = [
        request(f"{i}-{n}", prompt, index=n, max_new_tokens=new)
        for i, (prompt, copies, new) in enumerate(mix)
        for n in range(copies)
    ]

    async def main(engine):
        results = await asyncio.gather(*(engine.generate(r) for r in requests))
        state = await engine.health()
        assert (state.kv_tokens_used, state.num_running, state.num_waiting) == (0, 0, 0)
        return results

    for one, result in zip(requests, drive(start_engine(POLICY, **sizes), main), strict=True):
        expected = alone(one)
        assert result.token_ids == expected.token_ids
        assert result.log_probs == pytest.approx(expected.log_probs, abs=1e-4)


def test_running_out_of_pages_is_survived_and_costs_only_time():
    requests = [request(i, index=i, max_new_tokens=24) for i in range(10)]
    expected = [r.token_ids for r in generate_all(start_engine(POLICY), requests)]
    engine = start_engine(POLICY, kv_cache_tokens=44)
    assert [r.token_ids for r in generate_all(engine, requests)] == expected
    assert engine.counters.num_sampled_tokens == 240
    assert engine.counters.num_prefill_tokens > 10  # answers gave way and were computed again


def test_a_long_prompt_is_computed_in_pieces_between_the_tokens_of_others():
    long = [5 + i % 60 for i in range(200)]
    expected = generate(request("long", long)).token_ids

    async def main(engine):
        gate = Gate(at=2)
        first = asyncio.ensure_future(engine.generate(request("short", max_new_tokens=60), gate))
        num_steps = engine.counters.num_steps
        (second,) = await gate.here(engine.generate(request("long", long)))
        assert second.token_ids == expected
        assert engine.counters.num_steps - num_steps > 200 / 8
        assert len((await first).token_ids) == 60

    drive(start_engine(POLICY, prefill_chunk=8), main)


def test_neutral_settings_are_the_default():
    plain = SamplingParams(max_new_tokens=1)
    assert (plain.temperature, plain.top_p, plain.top_k, plain.min_p) == (1.0, 1.0, -1, 0.0)
    assert (plain.min_new_tokens, plain.stop, plain.stop_token_ids) == (0, (), ())
