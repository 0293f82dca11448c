"""Policy losses: T4, the formulas of GSPO, CISPO and decoupled PPO, and their gradients."""

import math

import pytest
import torch
from maths_proofs import random_batch

from limes.algorithms import corrections
from limes.algorithms.policy_loss import POLICY_LOSSES, cispo, clipped, gspo, reinforce

SYMMETRIC, HIGHER, DUAL = (
    {"eps_clip": 0.2},
    {"eps_clip": 0.2, "eps_clip_high": 0.28},
    {"eps_clip": 0.2, "eps_clip_c": 3.0},
)
T4 = [
    (1, 1, (-1, -1), (-1, -1), (-1, -1)),
    (1.5, 2, (-2.4, 0), (-2.56, 0), (-2.4, 0)),
    (1.25, 2, (-2.4, 0), (-2.5, -2.5), (-2.4, 0)),
    (0.5, 2, (-1, -1), (-1, -1), (-1, -1)),
    (1.5, -2, (3, 3), (3, 3), (3, 3)),
    (0.5, -2, (1.6, 0), (1.6, 0), (1.6, 0)),
    (4, -2, (8, 8), (8, 8), (6, 0)),
]


@pytest.mark.parametrize(("ratio", "advantage", "symmetric", "higher", "dual"), T4)
def test_t4(ratio, advantage, symmetric, higher, dual):
    for settings, (value, slope) in ((SYMMETRIC, symmetric), (HIGHER, higher), (DUAL, dual)):
        log_prob = torch.tensor([-1 + math.log(ratio)], dtype=torch.float64, requires_grad=True)
        old, advantages = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
        loss, _ = clipped(log_prob, old, advantages, **settings)
        (gradient,) = torch.autograd.grad(loss.sum(), log_prob)
        assert loss.item() == pytest.approx(value, abs=1e-12)
        assert gradient.item() == pytest.approx(slope, abs=1e-12)


def test_t4_first_step_value_is_minus_mean_advantage_and_the_gradient_is_not_zero():
    batch = random_batch(0)
    log_probs = batch.old_log_probs.clone().requires_grad_()
    loss, metrics = clipped(log_probs, batch.old_log_probs, batch.advantages, eps_clip=0.2)
    assert torch.equal(loss.detach(), -batch.advantages)
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    torch.testing.assert_close(gradient, -batch.advantages, rtol=0, atol=1e-12)
    assert metrics["ratio"].eq(1).all()
    assert metrics["ppo_kl"].eq(0).all()
    assert metrics["pg_clipfrac"].eq(0).all()


def test_gspo_is_the_clipped_surrogate_of_the_geometric_mean():
    batch = random_batch(1)
    log_probs = batch.log_probs.clone().requires_grad_()
    settings = {"eps_clip": 0.1, "eps_clip_high": 0.15}
    loss, metrics = gspo(
        log_probs, batch.old_log_probs, batch.advantages, lengths=batch.lengths, mask=batch.mask, **settings
    )
    start = 0
    for length in batch.lengths:
        tokens = [t for t in range(start, start + length) if batch.mask[t]]
        mean = sum(float(batch.log_probs[t] - batch.old_log_probs[t]) for t in tokens) / max(len(tokens), 1)
        for t in range(start, start + length):
            a, s = float(batch.advantages[t]), math.exp(mean)
            expected = -min(s * a, min(max(s, 0.9), 1.15) * a) if t in tokens else 0
            assert loss[t].item() == pytest.approx(expected, abs=1e-12)
            assert t not in tokens or metrics["ratio"][t].item() == pytest.approx(s, abs=1e-12)
        start += length


def test_gspo_gradient_is_s_a_over_length():
    log_probs = torch.tensor([-1.0, -2, -1.5], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.1, -1.9, -1.5], dtype=torch.float64)
    loss, _ = gspo(log_probs, old, torch.full((3,), 2.0), lengths=[3], mask=torch.ones(3), eps_clip=0.2)
    (gradient,) = torch.autograd.grad(loss.sum() / 3, log_probs)
    assert gradient.tolist() == pytest.approx([-2 / 3] * 3, abs=1e-12)


def test_gspo_of_single_tokens_is_ppo():
    batch = random_batch(2)
    ones, lengths = torch.ones_like(batch.mask), [1] * batch.mask.numel()
    sequence, _ = gspo(batch.log_probs, batch.old_log_probs, batch.advantages, lengths=lengths, mask=ones, eps_clip=0.2)
    token, _ = clipped(batch.log_probs, batch.old_log_probs, batch.advantages, eps_clip=0.2)
    assert torch.equal(sequence, token)


def test_cispo_keeps_every_gradient_and_bounds_its_weight():
    log_probs = torch.tensor([math.log(4) - 1, -1, math.log(0.5) - 1], dtype=torch.float64, requires_grad=True)
    old, advantages = torch.full((3,), -1.0, dtype=torch.float64), torch.tensor([2.0, 1, -3], dtype=torch.float64)
    loss, metrics = cispo(log_probs, old, advantages, eps_clip=0.2, eps_clip_high=0.28)
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    assert gradient.tolist() == pytest.approx([-2.56, -1, 2.4], abs=1e-12)
    expected = [g * x for g, x in zip([-2.56, -1, 2.4], log_probs.tolist(), strict=True)]
    assert loss.tolist() == pytest.approx(expected, abs=1e-12)
    assert metrics["pg_clipfrac"].tolist() == [1, 0, 1]


def test_cispo_with_eps_clip_one_is_open_below():
    log_probs = torch.tensor([-9.0], dtype=torch.float64)
    _, metrics = cispo(log_probs, torch.tensor([-1.0], dtype=torch.float64), torch.ones(1), eps_clip=1.0)
    assert metrics["pg_clipfrac"].tolist() == [0]


def test_reinforce_is_the_plain_policy_gradient():
    log_probs = torch.tensor([-1.0, -2], requires_grad=True)
    loss, _ = reinforce(log_probs, torch.tensor([-5.0, -2]), torch.tensor([3.0, -1]))
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    assert loss.tolist() == [3, -2]
    assert gradient.tolist() == [-3, 1]


def test_decoupled_ppo_is_a_trust_region_around_the_proximal_policy_times_its_importance_weight():
    batch = random_batch(3)
    behaviour, proximal = batch.rollout_log_probs, batch.old_log_probs
    loss, metrics = clipped(batch.log_probs, behaviour, batch.advantages, eps_clip=0.2, proximal_log_probs=proximal)
    inner, _ = clipped(batch.log_probs, proximal, batch.advantages, eps_clip=0.2)
    torch.testing.assert_close(loss, inner * (proximal - behaviour).exp(), rtol=0, atol=1e-12)
    weights, _ = corrections.truncated_importance(proximal, behaviour, high=1e6)
    assert torch.equal(metrics["behaviour_weight"], weights)


def test_decoupled_ppo_with_the_sampler_as_proximal_policy_is_ppo():
    batch = random_batch(3)
    arguments = batch.log_probs, batch.old_log_probs, batch.advantages
    decoupled, _ = clipped(*arguments, eps_clip=0.2, proximal_log_probs=batch.old_log_probs)
    assert torch.equal(decoupled, clipped(*arguments, eps_clip=0.2)[0])


def test_clip_fractions_count_the_branches_that_bound():
    old = torch.zeros(4, dtype=torch.float64)
    log_probs = torch.tensor([1.5, 1.5, 0.5, 4], dtype=torch.float64).log()
    _, metrics = clipped(log_probs, old, torch.tensor([2.0, -2, -2, -2]), eps_clip=0.2, eps_clip_c=3.0)
    assert metrics["pg_clipfrac"].tolist() == [1, 0, 1, 0]
    assert metrics["pg_clipfrac_lower"].tolist() == [0, 0, 0, 1]


CASES = [
    ("clipped", SYMMETRIC),
    ("clipped", HIGHER | {"eps_clip_c": 1.5}),
    ("gspo", {"eps_clip": 0.1}),
    ("cispo", SYMMETRIC),
    ("reinforce", {}),
]


@pytest.mark.parametrize(("name", "settings"), CASES)
@pytest.mark.parametrize("seed", range(3))
def test_gradients_equal_finite_differences(name, settings, seed):
    batch = random_batch(seed)
    loss_of = POLICY_LOSSES[name]

    def loss(log_probs):
        frozen = batch.log_probs if name == "cispo" else log_probs
        value, _ = loss_of(
            frozen, batch.old_log_probs, batch.advantages, lengths=batch.lengths, mask=batch.mask, **settings
        )
        # CISPO's weight is a constant by definition: finite differences move only the log-prob that it multiplies
        return value / torch.where(batch.mask != 0, batch.log_probs, 1) * log_probs if name == "cispo" else value

    log_probs = batch.log_probs.clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, (log_probs,))
    direct, _ = loss_of(
        log_probs, batch.old_log_probs, batch.advantages, lengths=batch.lengths, mask=batch.mask, **settings
    )
    ours = torch.autograd.grad(direct.sum(), log_probs)[0]
    torch.testing.assert_close(ours, torch.autograd.grad(loss(log_probs).sum(), log_probs)[0], rtol=0, atol=1e-12)


def test_decoupled_gradient_equals_finite_differences():
    batch = random_batch(5)

    def loss(log_probs):
        options = {"proximal_log_probs": batch.old_log_probs, "mask": batch.mask}
        return clipped(log_probs, batch.rollout_log_probs, batch.advantages, eps_clip=0.2, **options)[0]

    assert torch.autograd.gradcheck(loss, (batch.log_probs.clone().requires_grad_(),))


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_nothing_but_log_probs_gets_a_gradient_and_metrics_are_detached(name, settings):
    batch = random_batch(0)
    inputs = [x.clone().requires_grad_() for x in (batch.log_probs, batch.old_log_probs, batch.advantages)]
    loss, metrics = POLICY_LOSSES[name](*inputs, lengths=batch.lengths, mask=batch.mask, **settings)
    loss.sum().backward()
    assert inputs[0].grad is not None
    assert inputs[1].grad is None
    assert inputs[2].grad is None
    assert metrics
    assert all(not m.requires_grad and m.shape == loss.shape for m in metrics.values())


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_ratio_beyond_all_bounds_stays_finite(name, settings):
    log_probs = torch.tensor([0.0, -2000, 0], requires_grad=True)
    old, advantages = torch.tensor([-2000.0, 0, 0]), torch.tensor([-1.0, 1, 0])
    loss, _ = POLICY_LOSSES[name](log_probs, old, advantages, lengths=[1, 1, 1], mask=torch.ones(3), **settings)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert log_probs.grad.isfinite().all()


def test_bad_input_is_named():
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="equally long"):
        clipped(x, torch.zeros(3, 1), x, eps_clip=0.2)
    with pytest.raises(ValueError, match="equally long"):
        clipped(x, x, torch.zeros(1), eps_clip=0.2)
    with pytest.raises(ValueError, match=r"eps_clip_c=0\.5"):
        clipped(x, x, x, eps_clip=0.2, eps_clip_c=0.5)
    with pytest.raises(ValueError, match="lengths sum to 2"):
        gspo(x, x, x, lengths=[2], mask=x, eps_clip=0.2)
