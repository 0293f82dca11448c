"""Training speed: limes' train step against the same loss written plainly with transformers on padded batches.

    python benchmarks/train_step.py [--rounds 3]

8 prompts of 40 tokens with 8 answers of 32 tokens each, SmolLM2-135M in float32; clipped policy loss over the token
mean, gradient clipping, AdamW. Both sides train copies of one model on the same samples and advantages, in turns; the
first step's gradients are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from functools import partial

import torch
from machine import describe, matmul_gflops, spread
from transformers import AutoModelForCausalLM

from limes.algorithms.advantages import group_relative
from limes.config import Config, load_config
from limes.engine.embedded.engine import EmbeddedEngine
from limes.engine.protocol import GenerateRequest, SampleKey, SamplingParams
from limes.models.load import load_policy
from limes.models.policy import Policy
from limes.records import Sample, TrainShard
from limes.training.worker import TrainWorker

NUM_PROMPTS, PROMPT_LEN, NUM_ANSWERS, ANSWER_LEN = 8, 40, 8, 32
SEQUENCES_PER_PADDED_BATCH = 8


def make_config(temperature: float = 1.0) -> Config:
    """The settings of the limes side."""
    overrides = {
        "rollout": {"num_rollout": 100, "max_response_len": ANSWER_LEN, "temperature": temperature},
        "trainer": {"lr": 1e-6, "adam_beta2": 0.999},
    }
    return load_config(None, overrides)


def sample_rollout(policy: Policy, config: Config, rollout_id: int) -> tuple[TrainShard, EmbeddedEngine]:
    """A rollout of random prompts with alternating rewards; the engine comes back still running."""
    generator = torch.Generator().manual_seed(rollout_id)
    prompts = torch.randint(10, 40000, (NUM_PROMPTS, PROMPT_LEN), generator=generator).tolist()
    sampling = SamplingParams(max_new_tokens=ANSWER_LEN, temperature=config.rollout.temperature)
    engine = EmbeddedEngine(policy, kv_cache_tokens=8192)

    async def generate(sample: Sample) -> None:
        key = SampleKey(0, rollout_id, sample.index)
        result = await engine.generate(GenerateRequest(str(sample.index), sample.tokens, sampling, key))
        sample.append_tokens(result.token_ids, log_probs=result.log_probs, weight_versions=result.weight_versions)

    samples = [
        Sample(i, i // NUM_ANSWERS, tokens=list(prompts[i // NUM_ANSWERS])) for i in range(NUM_PROMPTS * NUM_ANSWERS)
    ]

    async def rollout() -> None:
        await asyncio.gather(*(generate(sample) for sample in samples))

    asyncio.run(rollout())
    rewards: list[float | None] = [float(i % 3 == 0) for i in range(len(samples))]
    trained = [sample.response_length for sample in samples]
    groups = [sample.group_index for sample in samples]
    return TrainShard(rollout_id, samples, list(range(len(samples))), rewards, groups, trained), engine


class PlainTrainer:
    """The same step written plainly: padded batches, logits, log-softmax, gather, accumulated gradients.

    Args:
        all_positions: take the log-softmax of every position and drop the prompt's afterwards, as most people write it;
            otherwise only that of the answers' positions, as a careful user would.
    """

    def __init__(self, policy: Policy, config: Config, *, all_positions: bool) -> None:
        self.first = 0 if all_positions else PROMPT_LEN - 1
        self.model = AutoModelForCausalLM.from_pretrained(policy.folder, dtype=torch.float32)
        self.lr = config.trainer.lr
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.lr, weight_decay=0.0, fused=True)

    def train(self, shard: TrainShard, advantages: torch.Tensor) -> float:
        """One optimizer step; returns the gradient's norm before clipping."""
        total = sum(shard.num_trained_tokens)
        ids = torch.tensor([sample.tokens for sample in shard.samples])
        for start in range(0, len(ids), SEQUENCES_PER_PADDED_BATCH):
            rows = ids[start : start + SEQUENCES_PER_PADDED_BATCH]
            logits = self.model(rows, attention_mask=torch.ones_like(rows), use_cache=False).logits
            log_p = torch.log_softmax(logits[:, self.first : -1].float(), -1)
            log_probs = log_p.gather(-1, rows[:, self.first + 1 :, None])[:, -ANSWER_LEN:, 0]
            ratio = (log_probs - log_probs.detach()).exp()
            advantage = advantages[start : start + SEQUENCES_PER_PADDED_BATCH, None]
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            (loss.sum() / total).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


def compare_speed(policy: Policy, rounds: int) -> None:
    """Time both sides in turns and print the ratio."""
    config = make_config()
    shard, engine = sample_rollout(policy, config, 0)
    asyncio.run(engine.close())
    worker = TrainWorker(policy, config, engine=engine)
    plain = {
        "plain": PlainTrainer(policy, config, all_positions=True),
        "careful": PlainTrainer(policy, config, all_positions=False),
    }
    advantages = group_relative(shard.rewards, shard.group_ids).float()
    num_tokens = sum(len(sample.tokens) for sample in shard.samples)
    sides: dict[str, Callable[[], float]] = {"limes": lambda: worker.train(0, shard)["train/grad_norm"]}
    sides |= {name: partial(trainer.train, shard, advantages) for name, trainer in plain.items()}
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for round_id in range(rounds):
        for name, step in sides.items():
            gflops, started = matmul_gflops(), time.perf_counter()
            norm = step()
            speeds[name].append(num_tokens / (time.perf_counter() - started))
            print(
                f"round {round_id}: {name:8} {speeds[name][-1]:6.1f} tok/s, gradient norm {norm:.6f}, "
                f"matrix product {gflops:.0f} GFLOP/s",
                flush=True,
            )
    print(f"limes    {spread(speeds['limes'])} tok/s")
    for name in plain:
        ratios = [ours / theirs for ours, theirs in zip(speeds["limes"], speeds[name], strict=True)]
        print(f"{name:8} {spread(speeds[name])} tok/s, limes is {spread(ratios, 2)} times as fast", flush=True)


def main() -> None:
    """Print both sides."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print(describe())
    policy = load_policy(load_config(None, {"rollout.num_rollout": 1}).model)
    policy.end_token_ids = ()
    compare_speed(policy, rounds)


if __name__ == "__main__":
    main()
