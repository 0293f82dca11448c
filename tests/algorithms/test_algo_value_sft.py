"""The critic's loss and supervised fine-tuning."""

import pytest
import torch
from maths_proofs import random_batch

from limes.algorithms import sft, value_loss
from limes.algorithms.aggregate import aggregate


def test_value_loss_takes_the_larger_of_plain_and_clipped():
    values = torch.tensor([1.0, 1.0, 0.6, 2.0], dtype=torch.float64, requires_grad=True)
    old, returns = torch.full((4,), 0.5, dtype=torch.float64), torch.tensor([0.0, 2.0, 1.0, 3.0], dtype=torch.float64)
    loss, metrics = value_loss.clipped(values, old, returns, value_clip=0.2)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    assert loss.tolist() == pytest.approx([1.0, 1.69, 0.16, 5.29])
    assert gradient.tolist() == pytest.approx([2.0, 0, -0.8, 0])
    assert metrics["value_clipfrac"].tolist() == [0, 1, 0, 1]


def test_value_loss_without_a_clip_is_the_squared_error():
    values, returns = torch.tensor([1.0, -1]), torch.tensor([0.0, 1])
    loss, metrics = value_loss.clipped(values, torch.full((2,), float("nan")), returns, value_clip=None)
    assert loss.tolist() == [1, 4]
    assert "value_clipfrac" not in metrics


@pytest.mark.parametrize("value_clip", [None, 0.2, 1.0])
def test_value_gradients_equal_finite_differences(value_clip):
    batch = random_batch(0)

    def loss(values):
        return value_loss.clipped(
            values, batch.old_log_probs, batch.advantages, value_clip=value_clip, mask=batch.mask
        )[0]

    assert torch.autograd.gradcheck(loss, (batch.log_probs.clone().requires_grad_(),))


def test_only_values_get_a_gradient():
    inputs = [torch.randn(3).requires_grad_() for _ in range(3)]
    value_loss.clipped(*inputs, value_clip=0.1)[0].sum().backward()
    assert [x.grad is not None for x in inputs] == [True, False, False]


def test_sft_is_the_mean_negative_log_likelihood_of_masked_in_tokens():
    log_probs = torch.tensor([-1.0, float("nan"), -3, -5])
    mask = torch.tensor([1, 0, 1, 1])
    loss, metrics = sft.negative_log_likelihood(log_probs, mask=mask)
    assert aggregate(loss, mask, [2, 2]).item() == 3
    assert metrics["nll"].tolist() == [1, 0, 3, 5]


def test_message_weights_scale_the_pull_and_not_the_denominator():
    log_probs = torch.tensor([-1.0, -2, -3], requires_grad=True)
    weights = sft.message_weights(torch.tensor([2.0, 0.0]), [2, 1], 3)
    loss, metrics = sft.negative_log_likelihood(log_probs, weights=weights)
    (gradient,) = torch.autograd.grad(aggregate(loss, torch.ones(3), [3]), log_probs)
    assert loss.tolist() == [2, 4, 0]
    assert metrics["nll"].tolist() == [1, 2, 3]
    assert gradient.tolist() == pytest.approx([-2 / 3, -2 / 3, 0])


def test_sft_gradient_equals_finite_differences():
    batch = random_batch(0)
    weights = batch.entropy
    leaf = batch.log_probs.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: sft.negative_log_likelihood(x, weights=weights, mask=batch.mask)[0], (leaf,)
    )


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_bad_message_weights_are_named(bad):
    with pytest.raises(ValueError, match="message weights"):
        sft.message_weights(torch.tensor([1.0, bad]), [1, 1], 2)
    with pytest.raises(ValueError, match="sum to 3"):
        sft.message_weights(torch.tensor([1.0, 1.0]), [1, 2], 2)
