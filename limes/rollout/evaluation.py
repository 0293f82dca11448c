"""Evaluation: a fixed set of prompts, several answers each, pass@k with intervals."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from limes.algorithms.metrics import pass_at_k
from limes.data import EncodedPrompt
from limes.engine.protocol import SampleKey
from limes.records import Group, Sample
from limes.rollout.filters import outcomes_of
from limes.rollout.metrics import Metrics, mean, sample_metrics
from limes.rollout.sampling import Sampler
from limes.rollout.statistics import proportion_interval
from limes.run.metrics import Last, Sum

RIGHT = 1.0


@dataclass(frozen=True)
class EvalSet:
    """Prompts to answer and how often.

    Attributes:
        ks: the k of each reported pass@k, at most `n_samples_per_prompt`.
        seed: of the sampling noise.
    """

    prompts: Sequence[EncodedPrompt]
    n_samples_per_prompt: int
    ks: Sequence[int]
    seed: int


def eval_seed(run_seed: int) -> int:
    """The noise seed of evaluations: a hash of the run's seed, so that evaluation never repeats the noise of training.

    Keys of evaluation have rollout id 0 whatever the rollout: all evaluations of a run share their noise and differ by
    the weights alone.
    """
    digest = hashlib.blake2b(f"limes evaluation {run_seed}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def default_ks(n_samples_per_prompt: int) -> list[int]:
    """1, 2, 4, ... and the number of answers itself."""
    powers = [2**i for i in range(n_samples_per_prompt.bit_length()) if 2**i < n_samples_per_prompt]
    return [*powers, n_samples_per_prompt]


async def evaluate(questions: EvalSet, sampler: Sampler) -> list[Group]:
    """Answer every prompt; groups in the order of the prompts."""
    groups = [new_group(questions, number) for number in range(len(questions.prompts))]
    tasks: dict[asyncio.Task[None], Group] = {}

    def start() -> dict[asyncio.Task[None], Group]:
        for group in groups:
            keys = [SampleKey(questions.seed, 0, sample.index) for sample in group]
            tasks[asyncio.create_task(sampler.complete_group(group, keys))] = group
        return tasks

    try:
        await sampler.submit_together(start)
        await asyncio.gather(*tasks)
    finally:
        await sampler.stop([task for task in tasks if not task.done()])
    return groups


def new_group(questions: EvalSet, number: int) -> Group:
    """Fresh samples of one evaluation prompt."""
    prompt = questions.prompts[number]
    return [
        Sample(
            index=number * questions.n_samples_per_prompt + member,
            group_index=number,
            rollout_id=number * questions.n_samples_per_prompt + member,
            prompt=prompt.prompt,
            tokens=list(prompt.token_ids),
            label=prompt.label,
            metadata=dict(prompt.metadata),
        )
        for member in range(questions.n_samples_per_prompt)
    ]


def eval_metrics(groups: Sequence[Group], ks: Sequence[int], reward_key: str | None) -> Metrics:
    """Rewards, lengths, failures, and pass@k with its 95% interval over prompts.

    An answer is right when its reward is at least 1. Unscored answers do not count; a prompt with fewer than k scored
    answers is outside pass@k.
    """
    samples = [sample for group in groups for sample in group]
    metrics = sample_metrics(samples, reward_key, "eval")
    metrics["eval/prompts"] = Sum(len(groups))
    scored = [outcomes_of(group, reward_key=reward_key) for group in groups]
    for k in ks:
        estimates = [
            pass_at_k(len(rewards), sum(reward >= RIGHT for reward in rewards), k)
            for rewards in scored
            if len(rewards) >= k
        ]
        if estimates:
            low, high = proportion_interval(estimates)
            metrics[f"eval/pass_at_{k}"] = mean(estimates)
            metrics[f"eval/pass_at_{k}_low"] = Last(low)
            metrics[f"eval/pass_at_{k}_high"] = Last(high)
    return metrics
