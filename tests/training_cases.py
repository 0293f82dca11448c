"""Random rollouts of a tiny model for the tests of training."""

from __future__ import annotations

import random
from typing import Any

import torch
from tiny import tiny_model, tiny_tokenizer

from limes.config import Config, load_config
from limes.models.policy import Policy, make_policy
from limes.records import Sample, TrainShard
from limes.training.forward import PackedForward
from limes.training.worker import TrainWorker


class NoEngine:
    """Counts the versions it is told."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    async def set_weight_version(self, version: int) -> None:
        self.versions.append(version)


def exact_policy(seed: int = 0, **options: Any) -> Policy:
    """A tiny policy in float64."""
    return make_policy(tiny_model(seed=seed, dtype=torch.float64, **options), tiny_tokenizer())


def make_config(**sections: dict[str, Any]) -> Config:
    """Settings of a small run."""
    base: dict[str, dict[str, Any]] = {
        "rollout": {"num_rollout": 10, "batch_size": 3, "n_samples_per_prompt": 4, "max_response_len": 8},
        "trainer": {"lr": 1e-2},
    }
    return load_config(None, {name: base.get(name, {}) | sections.get(name, {}) for name in {**base, **sections}})


def make_shard(policy: Policy, config: Config, seed: int = 0, *, tool_tokens: bool = True) -> TrainShard:
    """Random answers with some masked-out tokens; log-probs are the policy's own."""
    draw = random.Random(seed)
    samples = []
    for index in range(config.rollout.batch_size * config.rollout.n_samples_per_prompt):
        group = index // config.rollout.n_samples_per_prompt
        prompt = [3, *[20 + group] * (2 + group), 4]
        sample = Sample(index, group, tokens=prompt)
        for _ in range(draw.randint(1, 8)):
            masked = tool_tokens and draw.random() < 0.2
            values = {} if masked else {"log_probs": [0.0], "weight_versions": [0]}
            sample.append_tokens([draw.randint(30, 34)], trainable=not masked, **values)
        sample.loss_mask[-1] = 1
        sample.reward = float(draw.randint(0, 3))
        samples.append(sample)
    forward = PackedForward(policy, temperature=config.rollout.temperature, head_chunk=7)
    with torch.no_grad():
        log_probs = forward(samples).log_probs.split([s.response_length for s in samples])
    for sample, values in zip(samples, log_probs, strict=True):
        sample.rollout_log_probs = [v if m else 0.0 for v, m in zip(values.tolist(), sample.loss_mask, strict=True)]
    return shard_of(samples)


def shard_of(samples: list[Sample]) -> TrainShard:
    """The whole rollout as one rank's shard."""
    return TrainShard(
        rollout_id=0,
        samples=samples,
        partition=list(range(len(samples))),
        rewards=[sample.reward for sample in samples],  # type: ignore[misc]
        group_ids=[sample.group_index for sample in samples],
        num_trained_tokens=[sum(sample.loss_mask) for sample in samples],
    )


def worker_for(policy: Policy, config: Config, **options: Any) -> TrainWorker:
    """A worker that writes nothing."""
    return TrainWorker(policy, config, engine=NoEngine(), **options)


def parameters_after(policy: Policy) -> torch.Tensor:
    """All parameters in one vector."""
    return torch.cat([p.detach().flatten().clone() for p in policy.model.parameters()])
