"""KL estimators: T6, U51 to U54."""

import math

import pytest
import torch
from maths_proofs import LOGITS, REF_LOGITS, expected_gradient, random_batch

from limes.algorithms.kl import KINDS, penalty

T6A = [
    (-1, -1.5, (0.5, 0.125, 0.1065306597), (1, 0.5, 0.3934693403)),
    (-1, -0.5, (-0.5, 0.125, 0.1487212707), (1, -0.5, -0.6487212707)),
    (-2, -2, (0, 0, 0), (1, 0, 0)),
    (-0.1, -3, (2.9, 4.205, 1.9550232201), (1, 2.9, 0.9449767799)),
]
TRUE = [-0.2237421627, -0.1187373129, 0.3424794757]
REVERSED = [-0.4860863115, 0.0327869134, 0.4532993981]


@pytest.mark.parametrize(("log_prob", "ref", "values", "slopes"), T6A)
def test_t6a_values_and_gradients(log_prob, ref, values, slopes):
    for kind, value, slope in zip(("k1", "k2", "k3"), values, slopes, strict=True):
        x = torch.tensor([log_prob], dtype=torch.float64, requires_grad=True)
        estimate = penalty(x, torch.tensor([ref], dtype=torch.float64), kind)
        (gradient,) = torch.autograd.grad(estimate.sum(), x)
        assert estimate.item() == pytest.approx(value, abs=1e-10), kind
        assert gradient.item() == pytest.approx(slope, abs=1e-10), kind


def test_t6b_expectations():
    log_p, log_q = LOGITS.log_softmax(-1), REF_LOGITS.log_softmax(-1)
    expectation = {kind: float((log_p.exp() * penalty(log_p, log_q, kind)).sum()) for kind in KINDS}
    assert expectation["k1"] == pytest.approx(0.6290185589, abs=1e-10)
    assert expectation["k3"] == pytest.approx(0.6290185589, abs=1e-10)
    assert expectation["k2"] == pytest.approx(0.5928140742, abs=1e-10)


@pytest.mark.parametrize(
    ("kind", "expected"), [("k1", [0, 0, 0]), ("k2", TRUE), ("k3", REVERSED), ("low_var_kl", REVERSED)]
)
def test_t6b_u51_what_each_estimator_pulls_to_as_a_loss(kind, expected):
    gradient = expected_gradient(lambda x, ref: penalty(x, ref, kind))
    assert gradient.tolist() == pytest.approx(expected, abs=1e-10)


def test_t6b_k1_in_the_reward_has_the_true_gradient():
    gradient = expected_gradient(lambda x, ref: penalty(x.detach(), ref, "k1") * x)
    assert gradient.tolist() == pytest.approx(TRUE, abs=1e-10)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_kl_has_the_true_gradient(kind):
    gradient = expected_gradient(lambda x, ref: penalty(x, ref, kind, old_log_probs=x.detach()))
    assert gradient.tolist() == pytest.approx(TRUE, abs=1e-10)


def test_u54_unbiased_kl_weighs_by_the_ratio():
    x, ref = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([-1.5], dtype=torch.float64)
    for kind in KINDS:
        plain = penalty(x, ref, kind)
        weighted = penalty(x, ref, kind, old_log_probs=x - math.log(1.5))
        assert weighted.item() == pytest.approx(1.5 * plain.item(), abs=1e-12)


def test_unbiased_kl_of_off_policy_samples_is_the_kl():
    log_p, log_q = LOGITS.log_softmax(-1), REF_LOGITS.log_softmax(-1)
    sampler = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    for kind in ("k1", "k3"):
        value = (sampler.exp() * penalty(log_p, log_q, kind, old_log_probs=sampler)).sum()
        assert value.item() == pytest.approx(0.6290185589, abs=1e-10)


def test_low_var_kl_is_k3_within_ten():
    log_probs, ref = torch.tensor([-5.0, -1, -1]), torch.tensor([-0.1, -1.5, -1])
    k3 = penalty(log_probs, ref, "k3")
    assert k3[0] > 10
    assert penalty(log_probs, ref, "low_var_kl").tolist() == [10, *k3[1:].tolist()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unbiased", [False, True])
def test_gradients_equal_finite_differences(kind, unbiased):
    batch = random_batch(1)
    old = batch.old_log_probs if unbiased else None
    leaf = batch.log_probs.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: penalty(x, batch.ref_log_probs, kind, old_log_probs=old, mask=batch.mask), (leaf,)
    )


def test_the_reference_gets_no_gradient_and_kl_to_itself_is_zero():
    ref = torch.tensor([-1.0, -2], requires_grad=True)
    for kind in KINDS:
        estimate = penalty(torch.tensor([-1.0, -2], requires_grad=True), ref, kind)
        estimate.sum().backward()
        assert estimate.tolist() == [0, 0]
        assert ref.grad is None


def test_u53_an_unknown_name_is_an_error_that_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'low_var_kl'"):
        penalty(torch.zeros(1), torch.zeros(1), "low_var")
    with pytest.raises(ValueError, match="equally long"):
        penalty(torch.zeros(2), torch.zeros(1))
