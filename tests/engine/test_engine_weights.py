"""The engine on the trainer's own tensors: equal log-probs, versions, and nothing kept from old weights."""

import asyncio

import pytest
import torch
from engine_cases import PROMPTS, Gate, drive, full_log_probs, generate_all, request, start_engine, tiny_policy
from tiny import tiny_model, tiny_tokenizer

from limes.models.policy import make_policy
from limes.records import Sample
from limes.training.forward import PackedForward


def train_a_little(policy):
    """One real optimizer step on the shared tensors, large enough to change every log-prob."""
    sample = Sample(index=0, group_index=0, tokens=list(PROMPTS[0]))
    sample.append_tokens([20, 21, 22, 23], log_probs=[-1.0] * 4, weight_versions=[0] * 4)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=0.05)
    PackedForward(policy, temperature=1.0, head_chunk=8)([sample]).log_probs.mean().neg().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def pointers(policy):
    return [p.data_ptr() for p in policy.model.parameters()]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_engine_and_trainer_agree_before_and_after_an_optimizer_step(family, tied):
    policy = make_policy(tiny_model(family, tied=tied), tiny_tokenizer())
    requests = [request(f"{t}-{i}", PROMPTS[i % 4], index=i, temperature=t) for t in (0.6, 1.0, 1.7) for i in range(6)]

    async def main(engine):
        where = pointers(policy)
        first = await asyncio.gather(*(engine.generate(r) for r in requests))
        assert_equal_to_trainer(policy, requests, first)
        old = [full_log_probs(policy, r, result) for r, result in zip(requests, first, strict=True)]
        await asyncio.to_thread(train_a_little, policy)
        await engine.set_weight_version(1)
        assert pointers(policy) == where
        second = await asyncio.gather(*(engine.generate(r) for r in requests))
        assert_equal_to_trainer(policy, requests, second)
        new = [full_log_probs(policy, r, result) for r, result in zip(requests, first, strict=True)]
        assert all(abs(a[0] - b[0]) > 1e-3 for a, b in zip(old, new, strict=True))
        assert {v for r in first for v in r.weight_versions} == {0}
        assert {v for r in second for v in r.weight_versions} == {1}

    drive(start_engine(policy), main)


def assert_equal_to_trainer(policy, requests, results):
    for temperature in (0.6, 1.0, 1.7):
        pairs = [(r, o) for r, o in zip(requests, results, strict=True) if r.sampling.temperature == temperature]
        samples = []
        for i, (one, result) in enumerate(pairs):
            sample = Sample(index=i, group_index=0, tokens=list(one.prompt_ids))
            sample.append_tokens(result.token_ids, log_probs=result.log_probs, weight_versions=result.weight_versions)
            samples.append(sample)
        with torch.no_grad():
            outputs = PackedForward(policy, temperature=temperature, head_chunk=5)(samples)
        sampled = torch.tensor([p for _, result in pairs for p in result.log_probs])
        difference = (outputs.log_probs - sampled).abs()
        assert difference.mean() <= 1e-5
        assert difference.max() <= 1e-4
        assert (outputs.log_probs <= 0).all()
        assert (sampled <= 0).all()


def test_no_prefix_survives_an_update():
    """The same prompt again, and one that shares its pages, right after the weights changed."""
    policy = tiny_policy()
    asked = [request("a"), request("b", [*PROMPTS[0][:8], 60])]

    async def main(engine):
        for one in asked:
            await engine.generate(one)
        await asyncio.to_thread(train_a_little, policy)
        await engine.set_weight_version(1)
        for one in asked:
            result = await engine.generate(one)
            assert result.log_probs == pytest.approx(full_log_probs(policy, one, result), abs=1e-5)

    drive(start_engine(policy), main)


def test_flush_cache_forgets_prefixes():
    async def main(engine):
        for flush in (False, True):
            await engine.generate(request("a"))
            if flush:
                await engine.flush_cache()
            before = engine.counters.num_prefill_tokens
            await engine.generate(request("a"))
            assert engine.counters.num_prefill_tokens - before == (10 if flush else 2)

    drive(start_engine(), main)


def test_answers_that_have_not_begun_begin_on_the_new_weights():
    """An update while one answer runs, a prompt is half computed and a third answer waits."""
    policy = tiny_policy()
    long = [5 + i % 50 for i in range(40)]
    prompts = {"half": long, "same": PROMPTS[0], "waits": PROMPTS[2]}

    async def main(engine):
        gate = Gate(at=3)
        running = asyncio.ensure_future(engine.generate(request("running"), gate))
        others = {
            name: asyncio.ensure_future(engine.generate(request(name, prompt, index=7)))
            for name, prompt in prompts.items()
        }
        await gate.here(engine.pause("in_place"))
        state = await engine.health()
        assert state.num_waiting == 1
        await asyncio.to_thread(train_a_little, policy)
        await engine.set_weight_version(5)
        await engine.resume()
        assert (await running).weight_versions == [0] * 3 + [5] * 9
        for name, task in others.items():
            result = await task
            if name == "same":  # it had tokens already, on the prompt it shares with the first
                assert set(result.weight_versions) == {0, 5}
                continue
            assert set(result.weight_versions) == {5}
            expected = full_log_probs(policy, request(name, prompts[name]), result)
            assert result.log_probs == pytest.approx(expected, abs=1e-5)

    drive(start_engine(policy, max_running=3, prefill_chunk=12), main)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_versions_of_tokens_across_an_update_while_paused(mode):
    policy = tiny_policy()
    one = request("a", max_new_tokens=10)

    async def main(engine):
        gate = Gate(at=4)
        task = asyncio.ensure_future(engine.generate(one, gate))
        await gate.here(engine.pause(mode))
        await asyncio.to_thread(train_a_little, policy)
        await engine.set_weight_version(2)
        assert await engine.weight_version() == 2
        await engine.resume()
        result = await task
        assert result.weight_versions == [0] * 4 + [2] * 6
        assert len(result.token_ids) == len(result.log_probs) == 10
        after = full_log_probs(policy, one, result)[4:]
        if mode == "retract":  # everything was computed anew
            assert result.log_probs[4:] == pytest.approx(after, abs=1e-5)
        else:  # the keys are those of the old weights
            assert result.log_probs[4:] != pytest.approx(after, abs=1e-5)

    drive(start_engine(policy), main)


def test_versions_do_not_fall():
    async def main(engine):
        await engine.set_weight_version(3)
        await engine.set_weight_version(3)
        with pytest.raises(ValueError, match="version 2 is older than the engine's 3"):
            await engine.set_weight_version(2)
        assert await engine.weight_version() == 3

    drive(start_engine(), main)


def test_an_update_while_the_cache_is_offloaded():
    policy = tiny_policy()

    async def main(engine):
        await engine.generate(request("a"))
        await engine.offload(["kv_cache", "cuda_graph"])
        await asyncio.to_thread(train_a_little, policy)
        await engine.set_weight_version(1)
        await engine.onload(["kv_cache"])
        await engine.onload(["cuda_graph"])
        result = await engine.generate(request("a"))
        assert result.log_probs == pytest.approx(full_log_probs(policy, request("a"), result), abs=1e-5)
        assert set(result.weight_versions) == {1}

    drive(start_engine(policy), main)


def test_bfloat16_log_probs_are_proper_and_equal_the_trainers():
    policy = tiny_policy(dtype=torch.bfloat16)
    requests = [request(i, index=i) for i in range(4)]
    for one, result in zip(requests, generate_all(start_engine(policy), requests), strict=True):
        assert all(p <= 0 for p in result.log_probs)
        assert result.log_probs == pytest.approx(full_log_probs(policy, one, result), abs=0.1)
