"""Engine log-probs: missing ones, ones that the loss takes as old, and what is reported of them."""

import math

import pytest
import torch
from training_cases import exact_policy, make_config, make_shard, parameters_after, shard_of, worker_for

from limes.algorithms.estimators import EstimatorSettings
from limes.run.metrics import METRICS, Max
from limes.training.batch import make_batch
from limes.training.objective import Objective

SMALL = {"batch_size": 2, "n_samples_per_prompt": 3, "num_rollout": 10, "max_response_len": 8}


def small_policy():
    return exact_policy(num_layers=1, hidden_size=16)


def train(shard, steps=1, **algorithm):
    config = make_config(rollout=SMALL, algorithm=algorithm, trainer={"num_steps_per_rollout": steps, "lr": 1e-3})
    policy = small_policy()
    metrics = worker_for(policy, config).train(0, shard)
    return metrics, parameters_after(policy)


def fresh_shard():
    return make_shard(small_policy(), make_config(rollout=SMALL), seed=4)


@pytest.mark.parametrize("bad", [None, math.nan, -math.inf])
@pytest.mark.parametrize("correction", ["none", "tis", "mis"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_a_token_without_a_log_prob_counts_as_masked_out(bad, correction, aggregation):
    missing, masked = fresh_shard(), fresh_shard()
    num = 0
    for holed, cut in zip(missing.samples, masked.samples, strict=True):
        if holed.loss_mask[0] and sum(holed.loss_mask) > 1:
            holed.rollout_log_probs[0], cut.loss_mask[0] = bad, 0
            num += 1
    settings = {"correction": correction, "aggregation": aggregation}
    found, ends = train(missing, **settings)
    expected, expected_ends = train(shard_of(masked.samples), **settings)
    assert found["train/missing_log_probs"] == num > 2
    assert expected["train/missing_log_probs"] == 0
    assert found["train/grad_norm"] > 0
    torch.testing.assert_close(ends, expected_ends, rtol=0, atol=1e-12)


def test_a_sample_without_any_log_prob_leaves_the_denominators():
    shard, config = fresh_shard(), make_config(rollout=SMALL)
    shard.samples[2].rollout_log_probs = [math.nan] * shard.samples[2].response_length
    batch = make_batch(shard, "grpo", EstimatorSettings(), torch.device("cpu"))
    total = Objective(config).total(shard.num_trained_tokens, batch)
    assert total.tokens == sum(shard.num_trained_tokens) - shard.num_trained_tokens[2]
    assert total.sequences == len(shard.samples) - 1


def test_without_any_log_prob_nothing_trains_and_all_tokens_are_counted():
    shard = fresh_shard()
    for sample in shard.samples:
        sample.rollout_log_probs = []
    metrics, ends = train(shard, entropy_coef=0.1)
    assert metrics["train/skipped"] == 1
    assert metrics["train/missing_log_probs"] == sum(shard.num_trained_tokens)
    assert torch.equal(ends, parameters_after(small_policy()))


def shifted_shard(by=0.1):
    """The engine is less sure of every token than the trainer."""
    shard = fresh_shard()
    for sample in shard.samples:
        sample.rollout_log_probs = [value - by for value in sample.rollout_log_probs]
    return shard


def test_the_engines_log_probs_as_old_ones():
    own, _ = train(shifted_shard())
    engines, _ = train(shifted_shard(), use_rollout_log_probs=True)
    assert own["train/ratio"] == 1
    assert engines["train/ratio"] == pytest.approx(math.exp(0.1), abs=1e-6)
    assert own["train/logprob_abs_diff"] == engines["train/logprob_abs_diff"] == pytest.approx(0.1, abs=1e-6)
    assert own["train/logprob_abs_diff_p99"] == pytest.approx(0.1, abs=1e-6)
    assert own["train/ess"] == pytest.approx(1, abs=1e-6)  # equal weights, whatever their size


def test_decoupled_ppo_has_its_trust_region_around_the_start_and_weighs_by_it():
    metrics, _ = train(shifted_shard(1.0), use_decoupled_loss=True, eps_clip=0.2)
    assert metrics["train/ratio"] == 1
    assert metrics["train/pg_clipfrac"] == 0
    assert metrics["train/behaviour_weight"] == pytest.approx(math.exp(1.0), abs=1e-5)
    plain, _ = train(shifted_shard(1.0))
    assert metrics["train/grad_norm"] == pytest.approx(math.exp(1.0) * plain["train/grad_norm"], rel=1e-5)


def test_a_correction_weighs_by_trainer_over_engine():
    plain, _ = train(shifted_shard())
    for level in ("token", "geometric"):
        metrics, _ = train(shifted_shard(), correction="tis", correction_level=level)
        assert metrics["train/correction_weight"] == pytest.approx(math.exp(0.1), abs=1e-6)
        assert metrics["train/grad_norm"] == pytest.approx(math.exp(0.1) * plain["train/grad_norm"], rel=1e-6)


def test_rejected_tokens_leave_the_denominator_or_stay():
    shard = fresh_shard()
    rejected = 0
    for sample in shard.samples[::2]:
        sample.rollout_log_probs = [value - 3 for value in sample.rollout_log_probs]
        rejected += sum(sample.loss_mask)
    tokens = sum(shard.num_trained_tokens)
    leave, _ = train(shard, correction="mis")
    stay, _ = train(shard, correction="mis", rejected_tokens="stay")
    assert leave["train/tis_clipfrac"] == stay["train/tis_clipfrac"] == pytest.approx(rejected / tokens)
    assert stay["train/grad_norm"] == pytest.approx(leave["train/grad_norm"] * (tokens - rejected) / tokens, rel=1e-9)
    assert 0 < rejected < tokens


def test_opsm_silences_bad_answers_that_were_left_behind():
    shard = shifted_shard(-0.5)  # the engine was surer: old - current is 0.5
    metrics, _ = train(shard, use_opsm=True, use_rollout_log_probs=True, policy_loss="reinforce")
    assert metrics["train/opsm_kl"] == pytest.approx(0.5, abs=1e-6)
    assert 0 < metrics["train/opsm_clipfrac"] < 1
    loose, _ = train(shard, use_opsm=True, opsm_delta=0.6, use_rollout_log_probs=True, policy_loss="reinforce")
    assert loose["train/opsm_clipfrac"] == 0


def test_every_metric_of_training_is_declared():
    found = set(train(shifted_shard(), steps=2, kl_loss_coef=0.1, correction="icepop", eps_clip_c=3.0)[0])
    found |= set(train(shifted_shard(), steps=2, use_decoupled_loss=True, use_opsm=True)[0])
    undeclared = {name for name in found if name.startswith("train/")} - set(METRICS)
    assert undeclared == set()
    for name in found & set(METRICS):
        assert (METRICS[name].reduction is Max) == (name.endswith("_max") or name == "perf/train_time_s"), name
