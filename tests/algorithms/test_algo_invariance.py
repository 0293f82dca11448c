"""Cuts, shuffles and finite differences, for whatever test_algo_objective does not put through them."""

import itertools
import random

import pytest
import torch
from maths_proofs import Batch, loss_and_gradient, prove_cut_invariance, random_batch

from limes.algorithms import distill, sft, value_loss
from limes.algorithms.aggregate import AGGREGATIONS, aggregate, step_total
from limes.algorithms.corrections import CORRECTIONS, kept
from limes.algorithms.estimators import ESTIMATORS, EstimatorInputs, EstimatorSettings, Steps, estimate
from limes.algorithms.kl import KINDS, penalty
from limes.algorithms.objective import token_losses

RANKS = torch.arange(3, dtype=torch.float64)


def three(log_probs: torch.Tensor) -> torch.Tensor:
    """Log-probs of three tokens a position, of which the first is given."""
    return log_probs[:, None] - 1.5 - RANKS


LOSSES = {
    "sft": lambda b: sft.negative_log_likelihood(b.log_probs, weights=b.entropy, mask=b.mask)[0],
    "value": lambda b: value_loss.clipped(b.log_probs, b.old_log_probs, b.advantages, value_clip=0.2, mask=b.mask)[0],
    **{
        f"distillation, {direction}, {tail}": lambda b, direction=direction, tail=tail: distill.topk_loss(
            three(b.log_probs), three(b.ref_log_probs), direction=direction, tail=tail, mask=b.mask
        )[0]
        for direction in ("reverse", "forward")
        for tail in ("bin", "none")  # renormalised, log-probs that are shifted alike have no gradient
    },
    "distillation, surrogate": lambda b: distill.topk_surrogate(
        three(b.log_probs), three(b.old_log_probs), three(b.ref_log_probs), eps_clip=0.2, mask=b.mask
    )[0],
    **{f"kl {kind}": lambda b, kind=kind: penalty(b.log_probs, b.ref_log_probs, kind, mask=b.mask) for kind in KINDS},
}


def step_of(loss, how):
    """An optimizer step of one loss alone."""

    def run(ranks):
        parts = list(itertools.chain(*ranks))
        total = sum(step_total(p.mask, p.lengths, how) for p in parts)
        return sum(aggregate(LOSSES[loss](p), p.mask, p.lengths, how, total=total, constant=5) for p in parts)

    return run


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_p1_p2_every_other_loss_is_cut_invariant_and_silent_under_the_mask(loss, how):
    batch = random_batch(6)
    value, gradient = prove_cut_invariance(step_of(loss, how), batch, cuts=4)
    assert gradient.abs().max() > 0
    others = ("old_log_probs", "ref_log_probs", "entropy", "advantages")
    poisoned = batch.poisoned(float("nan"), others)
    other_value, other_gradient = loss_and_gradient(step_of(loss, how), poisoned)
    assert other_value == value
    assert torch.equal(other_gradient, gradient)


def factorisations(num):
    """Every ranks x micro-batches x sequences a micro-batch of `num` sequences in order."""
    for ranks in (n for n in range(1, num + 1) if num % n == 0):
        for parts in (n for n in range(1, num // ranks + 1) if num // ranks % n == 0):
            size = num // ranks // parts
            starts = range(0, num, num // ranks)
            yield [[list(range(s + p * size, s + (p + 1) * size)) for p in range(parts)] for s in starts]


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_u06_every_factorisation_of_eight_sequences_has_one_gradient(how):
    batch = random_batch(7, [3, 1, 7, 2, 5, 4, 6, 2])
    cuts = list(factorisations(8))
    assert len(cuts) == 10
    whole, gradient = loss_and_gradient(step_of("sft", how), batch)
    for cut in cuts:
        loss, slope = loss_and_gradient(step_of("sft", how), batch, cut)
        assert loss == pytest.approx(whole, abs=1e-10), cut
        torch.testing.assert_close(slope, gradient, rtol=0, atol=1e-10)


REWARDS, GROUPS = [1.0, 0.0, 0.5, 1.0, 0.25, 1.0, None], [0, 1, 0, 1, 1, 0, 1]


def advantages_by_sample(name, batch, order):
    """Advantages and returns of each sample, the samples handed over in another order and the groups renamed."""
    own = batch.take(order)
    place = {sample: position for position, sample in enumerate(order)}
    scores = [float((3 * sample) % 5) for sample in range(7)]
    steps = random.Random(len(order)).sample(range(7), 7)
    inputs = EstimatorInputs(
        [REWARDS[i] for i in order],
        [50 - 7 * GROUPS[i] for i in order],
        own.lengths,
        own.mask,
        kl=own.ref_log_probs,
        values=own.rollout_log_probs,
        steps=Steps(
            [scores[i] for i in steps],
            [place[i] for i in steps],
            [0] * 7,
            [(0, batch.lengths[i]) for i in steps],
        ),
    )
    settings = EstimatorSettings(kl_coef=0.1 if ESTIMATORS[name].kl_in_reward else 0.0, gamma=0.9, lambd=0.8)
    results = [tokens.split(own.lengths) for tokens in estimate(name, inputs, settings, dtype=torch.float64)]
    return {sample: [result[position] for result in results] for sample, position in place.items()}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_p3_every_estimator_follows_ids_and_not_positions(name):
    batch = random_batch(8)
    expected = advantages_by_sample(name, batch, list(range(7)))
    assert any(float(advantages.abs().max()) > 0 for advantages, _ in expected.values())
    for seed in range(5):
        order = random.Random(seed).sample(range(7), 7)
        found = advantages_by_sample(name, batch, order)
        for sample in range(7):
            for ours, theirs in zip(found[sample], expected[sample], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


# not cispo, whose ratio is a constant by definition: see test_algo_policy_loss
@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("loss", ["clipped", "gspo", "reinforce"])
def test_gradients_of_whole_objectives_equal_finite_differences(loss, how):
    batch = random_batch(9, [3, 5, 1, 2])
    for correction in CORRECTIONS:
        window = {"low": 0.7, "high": 1.5} if correction != "none" else {}
        shape = {"lengths": batch.lengths, "mask": batch.mask}
        weights, _ = CORRECTIONS[correction](batch.old_log_probs, batch.rollout_log_probs, **shape, **window)

        def value(log_probs, weights=weights):
            b = Batch(**(vars(batch) | {"log_probs": log_probs}))
            losses, _ = token_losses(
                b.log_probs,
                b.old_log_probs,
                b.advantages,
                lengths=b.lengths,
                mask=kept(weights),
                policy_loss=loss,
                settings={} if loss == "reinforce" else {"eps_clip": 0.2},
                weights=weights,
                ref_log_probs=b.ref_log_probs,
                kl_loss_coef=0.1,
                kl_loss_type="k3",
                use_unbiased_kl=True,
            )
            return aggregate(losses, kept(weights), b.lengths, how, constant=5)

        assert torch.autograd.gradcheck(value, (batch.log_probs.clone().requires_grad_(),))
