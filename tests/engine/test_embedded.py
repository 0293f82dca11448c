import asyncio

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from limes.engine.embedded.engine import EmbeddedEngine
from limes.engine.protocol import FinishReason, GenerateRequest, RequestRefused, SampleKey, SamplingParams
from limes.models.policy import make_policy


def make_engine(family="llama", **options):
    policy = make_policy(tiny_model(family), tiny_tokenizer())
    return EmbeddedEngine(policy, **({"kv_cache_tokens": 4096, "page_size": 4} | options))


def request(name, prompt, *, seed=0, index=0, **sampling):
    params = SamplingParams(**({"max_new_tokens": 12} | sampling))
    return GenerateRequest(str(name), prompt, params, SampleKey(seed, 0, index))


def run(engine, requests):
    async def main():
        try:
            return await asyncio.gather(*(engine.generate(r) for r in requests))
        finally:
            await engine.close()

    return asyncio.run(main())


def reference_log_probs(family, request, result):
    """transformers' own attention over the whole sequence, float64."""
    model = tiny_model(family).double()
    tokens = [*request.prompt_ids, *result.token_ids]
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0] / (request.sampling.temperature or 1.0)
    log_p = torch.log_softmax(logits, -1)[len(request.prompt_ids) - 1 : -1]
    return log_p.gather(-1, torch.tensor(result.token_ids)[:, None])[:, 0].tolist(), log_p


PROMPTS = [[3, 10, 11, 12, 13, 14, 15, 16, 17, 4], [3, 10, 11, 12, 13, 20, 4], [5, 9, 9, 4], [3, 40, 4]]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_log_probs_equal_a_full_forward(family, temperature):
    requests = [
        request(f"{p}-{n}", prompt, index=10 * p + n, temperature=temperature, max_new_tokens=3 + 5 * n)
        for p, prompt in enumerate(PROMPTS)
        for n in range(3)
    ]
    for req, result in zip(requests, run(make_engine(family), requests), strict=True):
        expected, _ = reference_log_probs(family, req, result)
        assert result.log_probs == pytest.approx(expected, abs=2e-5)
        assert len(result.log_probs) == len(result.token_ids) == len(result.weight_versions)


def test_tokens_do_not_depend_on_company_pages_or_pieces():
    requests = [request(i, PROMPTS[i % 4], index=i, max_new_tokens=20) for i in range(12)]
    together = run(make_engine(), requests)
    alone = [run(make_engine(page_size=16), [r])[0] for r in requests]
    tight = run(make_engine(kv_cache_tokens=64, max_running=5, prefill_chunk=3), requests)
    for a, b, c in zip(together, alone, tight, strict=True):
        assert a.token_ids == b.token_ids == c.token_ids
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-4)
        assert a.log_probs == pytest.approx(c.log_probs, abs=1e-4)


def test_shared_prompt_is_computed_once():
    engine = make_engine()
    run(engine, [request(i, PROMPTS[0], index=i) for i in range(8)] + [request("b", PROMPTS[1], index=9)])
    assert engine.counters.num_prefill_tokens == len(PROMPTS[0]) + len(PROMPTS[1]) - 4  # one shared page
    assert engine.counters.num_shared_tokens == 4


def test_greedy_takes_the_largest_logit():
    req = request("g", PROMPTS[0], temperature=0.0)
    result = run(make_engine(), [req])[0]
    _, log_p = reference_log_probs("llama", req, result)
    assert result.token_ids == log_p.argmax(-1).tolist()


def test_too_long_is_refused_with_the_numbers():
    engine = make_engine(kv_cache_tokens=32)
    with pytest.raises(RequestRefused, match=r"250 new tokens = 260 exceeds the context of 256"):
        run(engine, [request("a", PROMPTS[0], max_new_tokens=250)])
    with pytest.raises(RequestRefused, match=r"need 18 pages of 4, the KV cache has 8.*to 72"):
        run(engine, [request("a", PROMPTS[0], max_new_tokens=60)])
    assert (
        run(make_engine(kv_cache_tokens=32), [request("a", PROMPTS[3], max_new_tokens=20)])[0].finish_reason
        in FinishReason
    )
