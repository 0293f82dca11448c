"""One token's objective, and the product of everything that can be combined."""

import random
import warnings

import pytest
import torch
from maths_proofs import Batch, loss_and_gradient, prove_cut_invariance, random_batch

from limes.algorithms.aggregate import AGGREGATIONS, aggregate, step_total
from limes.algorithms.corrections import CORRECTIONS, kept, off_policy_sequence_mask
from limes.algorithms.estimators import ESTIMATORS, EstimatorInputs, EstimatorSettings, Steps, estimate
from limes.algorithms.metrics import merge, reduce_tokens
from limes.algorithms.objective import token_losses
from limes.algorithms.policy_loss import POLICY_LOSSES

LOSSES = {
    "clipped": {"eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": 3.0},
    "gspo": {"eps_clip": 0.1},
    "cispo": {"eps_clip": 1.0, "eps_clip_high": 0.5},
    "reinforce": {},
}
WINDOW = {"low": 0.7, "high": 1.5}
CORRECTED = {
    "none": ("none", {}),
    "icepop": ("icepop", {}),
    **{
        f"{name} {level}": (name, WINDOW | {"level": level})
        for name in ("tis", "mis")
        for level in ("token", "sequence", "geometric")
    },
}
REWARDS, GROUPS = [1.0, 0.0, 0.5, 1.0, 0.25, 1.0, None], [0, 0, 0, 1, 1, 1, 1]
POISONED = ("old_log_probs", "rollout_log_probs", "ref_log_probs", "entropy", "advantages")


def test_the_tables_under_test_are_whole():
    assert set(LOSSES) == set(POLICY_LOSSES)
    assert {name for name, _ in CORRECTED.values()} == set(CORRECTIONS)


def advantages_of(name: str, batch: Batch) -> torch.Tensor:
    steps = Steps([1.0, 0.5, 0, 1, 0.5, 2, 1], range(7), [0] * 7, [(0, n) for n in batch.lengths])
    inputs = EstimatorInputs(
        REWARDS, GROUPS, batch.lengths, batch.mask, kl=batch.ref_log_probs, values=batch.rollout_log_probs, steps=steps
    )
    settings = EstimatorSettings(kl_coef=0.1 if ESTIMATORS[name].kl_in_reward else 0.0, gamma=0.95, lambd=0.9)
    return estimate(name, inputs, settings, dtype=torch.float64)[0]


def weigh(batch: Batch, correction: str) -> torch.Tensor:
    name, settings = CORRECTED[correction]
    arguments = batch.old_log_probs, batch.rollout_log_probs
    return CORRECTIONS[name](*arguments, lengths=batch.lengths, mask=batch.mask, **settings)[0]


def objective(batch: Batch, loss: str, weights: torch.Tensor, mask: torch.Tensor):
    return token_losses(
        batch.log_probs,
        batch.old_log_probs,
        batch.advantages,
        lengths=batch.lengths,
        mask=mask,
        policy_loss=loss,
        settings=LOSSES[loss],
        weights=weights,
        ref_log_probs=batch.ref_log_probs,
        kl_loss_coef=0.05,
        kl_loss_type="k3",
        use_unbiased_kl=True,
        entropy=batch.entropy,
        entropy_coef=0.01,
    )


def step_loss(loss: str, how: str, correction: str):
    """Loss of an optimizer step whose rejected tokens leave the denominators."""

    def run(ranks):
        parts = [part for rank in ranks for part in rank]
        weights = [weigh(part, correction) for part in parts]
        masks = [kept(w) for w in weights]
        total = sum(step_total(mask, part.lengths, how) for part, mask in zip(parts, masks, strict=True))
        value = 0.0
        for part, weight, mask in zip(parts, weights, masks, strict=True):
            losses, _ = objective(part, loss, weight, mask)
            value = value + aggregate(losses, mask, part.lengths, how, total=total, constant=7)
        return value

    return run


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("correction", CORRECTED)
def test_every_estimator_loss_aggregation_and_correction_is_cut_invariant_and_silent_under_the_mask(
    estimator, correction
):
    batch = random_batch(3)
    clean = advantages_of(estimator, batch)
    tainted = batch.poisoned(float("nan"), POISONED)
    assert torch.equal(advantages_of(estimator, tainted), clean)
    batch.advantages = clean
    tainted = batch.poisoned(float("nan"), POISONED)
    for loss in LOSSES:
        for how in AGGREGATIONS:
            run = step_loss(loss, how, correction)
            value, gradient = prove_cut_invariance(run, batch, cuts=1)
            other_value, other_gradient = loss_and_gradient(run, tainted)
            assert value == other_value, (loss, how)
            assert torch.equal(gradient, other_gradient), (loss, how)
            assert gradient.isfinite().all()
            assert gradient.abs().max() > 0


# not cispo, whose ratio is a constant by definition: see test_algo_policy_loss
@pytest.mark.parametrize("loss", ["clipped", "gspo", "reinforce"])
def test_every_objective_has_the_gradient_that_finite_differences_find(loss):
    batch = random_batch(4)
    weights = weigh(batch, "mis token")

    def value(log_probs):
        tensors = {**vars(batch), "log_probs": log_probs}
        losses, _ = objective(Batch(**tensors), loss, weights, kept(weights))
        return aggregate(losses, kept(weights), batch.lengths, "sequence_mean")

    assert torch.autograd.gradcheck(value, (batch.log_probs.clone().requires_grad_(),))


def plain(batch, **options):
    leaf = batch.log_probs.clone().requires_grad_()
    shape = {"lengths": batch.lengths, "mask": batch.mask, "policy_loss": "clipped", "settings": {"eps_clip": 0.2}}
    losses, metrics = token_losses(leaf, batch.old_log_probs, batch.advantages, **(shape | options))
    (gradient,) = torch.autograd.grad(aggregate(losses, batch.mask, batch.lengths), leaf)
    return losses.detach(), gradient, metrics


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_u52_u13_without_advantages_only_the_kl_pulls(kind):
    batch = random_batch(0)
    batch.advantages = torch.zeros_like(batch.advantages)
    d = batch.log_probs - batch.ref_log_probs
    slope = {"k1": torch.ones_like(d), "k2": d, "k3": 1 - (-d).exp()}[kind]
    expected = torch.where(batch.mask != 0, 0.3 * slope, 0.0) / batch.mask.sum()
    _, gradient, _ = plain(batch, ref_log_probs=batch.ref_log_probs, kl_loss_coef=0.3, kl_loss_type=kind)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
    losses, dead, metrics = plain(batch, ref_log_probs=batch.ref_log_probs)
    assert dead.eq(0).all()
    assert losses.eq(0).all()
    assert metrics["kl_loss"].abs().max() > 0


def test_the_entropy_bonus_raises_entropy():
    log_probs = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    entropy = torch.tensor([0.5, 0.7], dtype=torch.float64, requires_grad=True)
    shape = {"lengths": [2], "mask": torch.ones(2), "policy_loss": "reinforce", "settings": {}}
    losses, metrics = token_losses(log_probs, log_probs, torch.zeros(2), **shape, entropy=entropy, entropy_coef=0.1)
    assert torch.autograd.grad(losses.sum(), entropy)[0].tolist() == [-0.1, -0.1]
    assert metrics["entropy"].tolist() == [0.5, 0.7]
    assert not metrics["entropy"].requires_grad


def test_weights_touch_the_policy_loss_alone():
    batch = random_batch(0)
    options = {"ref_log_probs": batch.ref_log_probs, "kl_loss_coef": 1.0}
    once, _, _ = plain(batch, **options)
    twice, _, metrics = plain(batch, weights=torch.full_like(batch.mask, 2), **options)
    kl_only, _, _ = plain(batch, weights=torch.zeros_like(batch.mask), **options)
    torch.testing.assert_close(twice - kl_only, 2 * (once - kl_only), rtol=0, atol=1e-12)
    torch.testing.assert_close(twice - kl_only, metrics["pg_loss"], rtol=0, atol=1e-12)


def test_weights_are_constants_and_silent_under_the_mask():
    batch = random_batch(0)
    weights = weigh(batch, "tis token")
    clean, gradient, _ = plain(batch, weights=weights)
    tainted = torch.where(batch.mask != 0, weights, float("nan")).requires_grad_()
    losses, other_gradient, _ = plain(batch, weights=tainted)
    assert torch.equal(losses, clean)
    assert torch.equal(gradient, other_gradient)
    shape = {"lengths": batch.lengths, "mask": batch.mask, "policy_loss": "reinforce", "settings": {}}
    assert not token_losses(batch.log_probs, batch.log_probs, batch.advantages, **shape, weights=tainted)[
        0
    ].requires_grad


def test_opsm_joins_as_one_more_weight():
    batch = random_batch(0)
    shape = {"lengths": batch.lengths, "mask": batch.mask}
    weights, _ = off_policy_sequence_mask(batch.log_probs, batch.old_log_probs, batch.advantages, delta=0.0, **shape)
    _, gradient, _ = plain(batch, weights=weights)
    rejected = (weights == 0) & (batch.mask != 0)
    assert bool(rejected.any())
    assert gradient[rejected].eq(0).all()


def test_metrics_are_detached_per_token_and_merge_over_micro_batches():
    batch = random_batch(0)
    _, metrics = objective(batch, "clipped", weigh(batch, "none"), batch.mask)
    assert all(not m.requires_grad and m.shape == batch.mask.shape for m in metrics.values())
    parts = []
    for sequences in ([0, 3], [1, 2, 6], [4, 5]):
        part = batch.take(sequences)
        parts.append(reduce_tokens(objective(part, "clipped", weigh(part, "none"), part.mask)[1], part.mask))
    whole = {name: part.result for name, part in reduce_tokens(metrics, batch.mask).items()}
    assert {name: part.result for name, part in merge(parts).items()} == pytest.approx(whole, abs=1e-12)


def test_contradictions_are_named():
    batch = random_batch(0)
    with pytest.raises(ValueError, match=r"kl_loss_coef=0.1 needs ref_log_probs"):
        plain(batch, kl_loss_coef=0.1)
    with pytest.raises(ValueError, match=r"entropy_coef=0.1 needs entropy"):
        plain(batch, entropy_coef=0.1)
    with pytest.raises(ValueError, match="did you mean 'clipped'"):
        plain(batch, policy_loss="clip")


def test_a_long_run_of_random_batches_stays_finite():
    rng = random.Random(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(20):
            batch = random_batch(seed, [rng.randint(0, 5) for _ in range(rng.randint(1, 6))] + [1])
            losses, gradient, _ = plain(batch, weights=weigh(batch, "tis token"))
            assert losses.isfinite().all()
            assert gradient.isfinite().all()
