"""P1 cut invariance, P2 mask silence and P3 permutation of a whole optimizer step, and proof that each one bites."""

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import exact_policy, make_config, make_shard, parameters_after, shard_of, worker_for

import limes.training.objective as objective_module
from limes.algorithms.estimators import EstimatorSettings
from limes.training.batch import make_batch, optimizer_steps
from limes.training.forward import PackedForward
from limes.training.objective import Objective
from limes.training.optimizer import PolicyOptimizer
from limes.training.packing import cut_micro_batches
from limes.training.step import StepMetrics, gradient_step

AGGREGATIONS = ["token_mean", "sequence_mean", "sequence_sum", "constant"]


def gradient_of(shard, config, micro_batches=None, *, share=True, poison=None, seed=0):
    """Loss and gradient of one optimizer step, cut as asked; `poison` goes under every mask."""
    policy = exact_policy()
    batch = make_batch(shard, "grpo", EstimatorSettings(), policy.device)
    drift = [
        0.05 * math.sin(7 * sample.index + place) for sample in batch.samples for place in range(sample.response_length)
    ]
    batch.old_log_probs = batch.rollout_log_probs + torch.tensor(drift)
    if poison is not None:
        hidden = batch.mask == 0
        for name in ("advantages", "rollout_log_probs", "old_log_probs"):
            getattr(batch, name)[hidden] = poison
    forward = PackedForward(policy, temperature=config.rollout.temperature, head_chunk=5, share_prefixes=share)
    optimizer = PolicyOptimizer(policy.model.named_parameters(), config.trainer)
    ((own, trained),) = optimizer_steps(shard, 1)
    assert own == list(range(len(shard.samples)))
    metrics = StepMetrics()
    parts = [batch.select(indices) for indices in micro_batches or [own]]
    objective = Objective(config)
    gradient_step(parts, forward, optimizer, objective, objective.total(trained, batch), metrics)
    gradient = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    metrics.stepped(0.0, 1.0)
    return metrics.summary(1.0), gradient


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_cut_invariance(aggregation, data):
    config = make_config(algorithm={"aggregation": aggregation})
    shard = make_shard(exact_policy(), config, seed=data.draw(st.integers(0, 99)))
    order = data.draw(st.permutations(range(len(shard.samples))))
    bounds = sorted(data.draw(st.sets(st.integers(1, len(order) - 1), max_size=5)))
    cut = [order[a:b] for a, b in zip([0, *bounds], [*bounds, len(order)], strict=True)]
    whole, gradient = gradient_of(shard, config)
    parts, gradient_of_parts = gradient_of(shard, config, cut, share=data.draw(st.booleans()))
    torch.testing.assert_close(gradient_of_parts, gradient, rtol=0, atol=1e-10)
    for name in ("train/loss", "train/entropy", "train/pg_clipfrac", "train/ppo_kl", "train/logprob_abs_diff"):
        assert parts[name] == pytest.approx(whole[name], abs=1e-10), name


def test_cut_invariance_bites(monkeypatch):
    """A mean taken over each micro-batch, the best known fault, is seen."""
    config = make_config()
    shard = make_shard(exact_policy(), config)
    cut = [[0, 1, 2], list(range(3, len(shard.samples)))]
    _, gradient = gradient_of(shard, config)
    own = objective_module.aggregate
    monkeypatch.setattr(objective_module, "aggregate", lambda *args, **named: own(*args, **(named | {"total": None})))
    _, faulty = gradient_of(shard, config, cut)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(faulty, gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e9])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_mask_silence(aggregation, poison):
    config = make_config(algorithm={"aggregation": aggregation})
    shard = make_shard(exact_policy(), config)
    assert any(0 in sample.loss_mask for sample in shard.samples)
    clean, gradient = gradient_of(shard, config)
    dirty, gradient_of_dirty = gradient_of(shard, config, poison=poison)
    assert torch.equal(gradient, gradient_of_dirty)
    assert clean == dirty


def test_mask_silence_bites(monkeypatch):
    """Masking by multiplication lets a NaN through."""
    config = make_config()
    shard = make_shard(exact_policy(), config)

    def by_multiplication(losses, mask, lengths, how, *, total, constant):
        return (losses * mask).sum() / total

    monkeypatch.setattr(objective_module, "aggregate", by_multiplication)
    own = objective_module.token_losses
    monkeypatch.setattr(
        objective_module,
        "token_losses",
        lambda *args, **options: own(*args, **(options | {"mask": torch.ones_like(options["mask"])})),
    )
    dirty, _ = gradient_of(shard, config, poison=float("nan"))
    assert dirty["train/loss"] != gradient_of(shard, config)[0]["train/loss"]


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 99))
def test_permutation(seed):
    """Samples in another order, groups torn apart: advantages move with their ids, the step is the same."""
    config = make_config()
    shard = make_shard(exact_policy(), config, seed)
    shuffled = shard.samples[:]
    random.Random(seed).shuffle(shuffled)
    device = torch.device("cpu")
    found = []
    for samples in (shard.samples, shuffled):
        batch = make_batch(shard_of(samples), "grpo", EstimatorSettings(), device)
        found.append({s.index: a.tolist() for s, a in zip(samples, batch.advantages.split(batch.lengths), strict=True)})
    assert found[0] == found[1]
    torch.testing.assert_close(
        gradient_of(shard_of(shuffled), config)[1], gradient_of(shard, config)[1], rtol=0, atol=1e-10
    )


def test_permutation_bites():
    """Group membership taken from position, not from the id, is seen."""
    config = make_config()
    shard = make_shard(exact_policy(), config)
    reversed_shard = shard_of(shard.samples[::-1][2:] + shard.samples[::-1][:2])
    by_position = replace(reversed_shard, group_ids=[i // 4 for i in range(12)])
    _, gradient = gradient_of(shard, config)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(gradient_of(by_position, config)[1], gradient, rtol=0, atol=1e-10)


@settings(max_examples=5, deadline=None)
@given(ranks=st.integers(1, 4), seed=st.integers(0, 99))
def test_shards_of_a_rollout_add_up(ranks, seed):
    """The gradient of fake ranks, each with its own samples and the global counts, sums to that of one rank."""
    config = make_config(algorithm={"aggregation": "sequence_mean"})
    shard = make_shard(exact_policy(), config, seed)
    total = torch.zeros(())
    for rank in range(ranks):
        partition = list(range(rank, len(shard.samples), ranks))
        own = replace(shard, samples=[shard.samples[i] for i in partition], partition=partition)
        total = total + gradient_of(own, config)[1]
    torch.testing.assert_close(total, gradient_of(shard, config)[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("max_tokens", [1, 17, 60, 10_000])
def test_a_whole_step_does_not_depend_on_the_micro_batches(max_tokens):
    ends = []
    for limit in (10_000, max_tokens):
        config = make_config(trainer={"max_tokens_per_micro_batch": limit, "lr": 1e-2})
        policy = exact_policy()
        shard = make_shard(policy, config)
        cut = cut_micro_batches([s.tokens for s in shard.samples], limit)
        assert (len(cut) > 1) == (limit < 100)
        worker_for(policy, config).train(0, shard)
        ends.append(parameters_after(policy))
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=1e-7)  # Adam divides rounding by tiny gradients
