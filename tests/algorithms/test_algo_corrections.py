"""Importance corrections: windows, levels, missing log-probs, OPSM."""

import math

import pytest
import torch
from maths_proofs import random_batch

from limes.algorithms import corrections
from limes.algorithms.corrections import (
    CORRECTIONS,
    icepop,
    kept,
    masked_importance,
    off_policy_sequence_mask,
    truncated_importance,
)

LOG_RATIOS = torch.tensor([0.1, -1.5, 0.8, -10, 0.3], dtype=torch.float64)
ZEROS = torch.zeros(5, dtype=torch.float64)
ONES = torch.ones(5)


def test_token_level_windows():
    ratios = LOG_RATIOS.exp().tolist()
    truncated, metrics = truncated_importance(LOG_RATIOS, ZEROS, low=0.5, high=2.0)
    assert truncated.tolist() == pytest.approx([ratios[0], 0.5, 2.0, 0.5, ratios[4]], abs=1e-12)
    assert metrics["tis_clipfrac"].tolist() == [0, 1, 1, 1, 0]
    masked, metrics = masked_importance(LOG_RATIOS, ZEROS, low=0.5, high=2.0)
    assert masked.tolist() == pytest.approx([ratios[0], 0, 0, 0, ratios[4]], abs=1e-12)
    assert metrics["tis_clipfrac"].tolist() == [0, 1, 1, 1, 0]
    assert torch.equal(icepop(LOG_RATIOS, ZEROS)[0] > 0, torch.tensor([1, 0, 1, 0, 1]).bool())


def test_truncation_from_above_alone_is_the_default():
    assert truncated_importance(LOG_RATIOS, ZEROS, high=2.0)[0].tolist() == pytest.approx(
        [min(math.exp(x), 2.0) for x in LOG_RATIOS.tolist()], abs=1e-12
    )


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("correct", [truncated_importance, masked_importance])
def test_levels_match_a_plain_loop(level, correct):
    batch = random_batch(0)
    low, high = 0.8, 1.3
    weights, _ = correct(
        batch.old_log_probs,
        batch.rollout_log_probs,
        low=low,
        high=high,
        level=level,
        lengths=batch.lengths,
        mask=batch.mask,
    )
    difference = (batch.old_log_probs - batch.rollout_log_probs).tolist()
    start = 0
    for length in batch.lengths:
        tokens = [t for t in range(start, start + length) if batch.mask[t]]
        total = sum(difference[t] for t in tokens)
        for t in range(start, start + length):
            log_weight = {"token": difference[t], "sequence": total, "geometric": total / max(len(tokens), 1)}[level]
            raw = math.exp(log_weight)
            bounded = min(max(raw, low), high)
            inside = raw == bounded
            expected = bounded if correct is truncated_importance else raw * inside
            assert weights[t].item() == pytest.approx(expected if t in tokens else 0, abs=1e-12)
        start += length


def test_identical_engines_weigh_one_everywhere():
    batch = random_batch(1)
    for name, correct in CORRECTIONS.items():
        options = {} if name in ("none", "icepop") else {"low": 0.5, "high": 2.0}
        weights, metrics = correct(
            batch.old_log_probs, batch.old_log_probs, lengths=batch.lengths, mask=batch.mask, **options
        )
        assert torch.equal(weights, batch.mask), name
        assert metrics["train_rollout_logprob_abs_diff"].eq(0).all()
        assert metrics["rollout_kl_k3"].eq(0).all()


@pytest.mark.parametrize("missing", [math.nan, -math.inf])
def test_a_missing_engine_log_prob_costs_its_own_token_and_is_counted(missing):
    rollout = torch.tensor([0.0, missing, 0, 0, 0], dtype=torch.float64)
    mask = torch.tensor([1, 1, 1, 0, 1])
    for level in ("token", "sequence", "geometric"):
        weights, metrics = truncated_importance(LOG_RATIOS, rollout, high=9.0, level=level, lengths=[3, 2], mask=mask)
        assert kept(weights).tolist() == [True, False, True, False, True]
        assert metrics["missing_log_probs"].tolist() == [0, 1, 0, 0, 0]
        assert all(m.isfinite().all() for m in metrics.values())
    weights, _ = truncated_importance(LOG_RATIOS, rollout, high=9.0, level="geometric", lengths=[3, 2], mask=mask)
    assert weights[0].item() == pytest.approx(math.exp((0.1 + 0.8) / 2))
    assert corrections.uncorrected(LOG_RATIOS, rollout, mask=mask)[0].tolist() == [1, 1, 1, 0, 1]


def test_no_weight_is_zero_unless_rejected():
    far = torch.tensor([-1000.0, 1000])
    weights, _ = truncated_importance(far, torch.zeros(2), high=2.0)
    assert kept(weights).all()
    assert weights[1] == 2


def test_veto_drops_the_whole_sequence():
    weights, metrics = masked_importance(LOG_RATIOS, ZEROS, low=0.5, high=3.0, veto=1e-3, lengths=[3, 2])
    assert kept(weights).tolist() == [True, False, True, False, False]
    assert metrics["tis_clipfrac"].tolist() == [0, 1, 0, 1, 1]


def test_opsm_rejects_negative_tokens_of_sequences_left_behind():
    old = torch.zeros(5, dtype=torch.float64)
    log_probs = torch.tensor([-0.4, -0.2, -9, 0.1, -0.1], dtype=torch.float64)
    mask = torch.tensor([1, 1, 0, 1, 1])
    advantages = torch.tensor([-1.0, 1, -1, -1, 1])
    weights, metrics = off_policy_sequence_mask(log_probs, old, advantages, delta=0.2, lengths=[3, 2], mask=mask)
    assert weights.tolist() == [0, 1, 0, 1, 1]
    assert metrics["opsm_kl"].tolist() == pytest.approx([0.3] * 3 + [0.0] * 2, abs=1e-12)
    assert metrics["opsm_clipfrac"].tolist() == [1, 0, 0, 0, 0]
    loose, _ = off_policy_sequence_mask(log_probs, old, advantages, delta=0.31, lengths=[3, 2], mask=mask)
    assert loose.tolist() == [1, 1, 0, 1, 1]


def test_weights_and_metrics_are_detached_and_per_token():
    batch = random_batch(2)
    trainer = batch.old_log_probs.clone().requires_grad_()
    for weights, metrics in (
        truncated_importance(trainer, batch.rollout_log_probs, high=2.0),
        masked_importance(trainer, batch.rollout_log_probs, low=0.5, high=2.0),
        off_policy_sequence_mask(
            trainer, batch.rollout_log_probs, batch.advantages, delta=0.1, lengths=batch.lengths, mask=batch.mask
        ),
    ):
        for tensor in (weights, *metrics.values()):
            assert not tensor.requires_grad
            assert tensor.shape == trainer.shape


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"level": "sequences", "high": 2.0}, "did you mean 'sequence'"),
        ({"level": "sequence", "high": 2.0}, "pass lengths="),
        ({"level": "geometric", "high": 2.0}, "pass lengths="),
        ({"low": 2.0, "high": 1.0}, "low < high"),
    ],
)
def test_bad_settings_are_named(options, match):
    with pytest.raises(ValueError, match=match):
        truncated_importance(LOG_RATIOS, ZEROS, **options)
    with pytest.raises(ValueError, match="pass lengths="):
        masked_importance(LOG_RATIOS, ZEROS, low=0.5, high=2.0, veto=0.1)
