"""Aggregation: T1, T9 and the rows on loss normalisation."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from maths_proofs import random_batch

from limes.algorithms import corrections, distill
from limes.algorithms.aggregate import AGGREGATIONS, aggregate, step_total

LOSSES = torch.tensor([1.0, 3, 2, 2, 2, 2, 8], dtype=torch.float64)
ONES = torch.ones(7)
LENGTHS = [2, 4, 1]
T1 = {"token_mean": 20 / 7, "sequence_mean": 4.0, "sequence_sum": 20 / 3, "constant": 5 / 3}


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_t1_whole(how):
    assert aggregate(LOSSES, ONES, LENGTHS, how, constant=4).item() == pytest.approx(T1[how], abs=1e-12)


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_t1_cut_into_micro_batches_adds_up(how):
    parts = [(LOSSES[:2], [2]), (LOSSES[2:], [4, 1])]
    total = sum(step_total(torch.ones(len(losses)), lengths, how) for losses, lengths in parts)
    value = sum(aggregate(losses, torch.ones(len(losses)), n, how, total=total, constant=4) for losses, n in parts)
    assert value.item() == pytest.approx(T1[how], abs=1e-12)


def test_t1_known_wrong_values_are_what_local_means_give():
    micro = [aggregate(LOSSES[:2], ONES[:2], [2]), aggregate(LOSSES[2:], ONES[2:], [4, 1])]
    ranks = [aggregate(LOSSES[:6], ONES[:6], [2, 4]), aggregate(LOSSES[6:], ONES[6:], [1])]
    assert sum(micro).item() / 2 == pytest.approx(2.6)
    assert sum(ranks).item() / 2 == pytest.approx(5)


def test_u02_each_optimizer_step_counts_its_own_tokens():
    total = sum(step_total(torch.ones(2), [2]) for _ in range(4))
    losses = [aggregate(torch.ones(2), torch.ones(2), [2], total=total) for _ in range(4)]
    assert sum(losses).item() == 1.0


def test_u03_splitting_does_not_divide_the_gradient():
    leaf = torch.randn(8, dtype=torch.float64, requires_grad=True)
    (whole,) = torch.autograd.grad(aggregate(leaf**2, torch.ones(8), [4, 4]), leaf)
    total = step_total(torch.ones(8), [4, 4])
    parts = [aggregate(leaf[i : i + 2] ** 2, torch.ones(2), [2], total=total) for i in range(0, 8, 2)]
    (cut,) = torch.autograd.grad(sum(parts), leaf)
    torch.testing.assert_close(cut, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("width", [4, 10])
def test_u08_padding_does_not_move_dr_grpo(width):
    rows = LOSSES.split(LENGTHS)
    losses = torch.cat([torch.cat([row, torch.full((width - len(row),), math.nan)]) for row in rows])
    mask = torch.cat([torch.cat([torch.ones(len(row)), torch.zeros(width - len(row))]) for row in rows])
    assert aggregate(losses, mask, [width] * 3, "constant", constant=4).item() == pytest.approx(5 / 3, abs=1e-12)


def test_u09_a_distillation_loss_counts_like_any_other():
    student = torch.zeros(7, 1, dtype=torch.float64)
    loss, _ = distill.topk_loss(student, -LOSSES[:, None], tail="none")
    total = step_total(ONES, LENGTHS)
    parts = aggregate(loss[:2], ONES[:2], [2], total=total) + aggregate(loss[2:], ONES[2:], [4, 1], total=total)
    assert parts.item() == pytest.approx(20 / 7, abs=1e-12)


def test_t9_rejected_tokens_leave_the_denominator_unless_kept_by_choice():
    log_ratios = torch.tensor([0.1, -1.5, 0.8, -10, 0.3], dtype=torch.float64)
    mask = torch.ones(5)
    weights, _ = corrections.masked_importance(log_ratios, torch.zeros(5, dtype=torch.float64), low=0.5, high=2.0)
    kept = corrections.kept(weights)
    assert kept.tolist() == [True, False, False, False, True]
    assert aggregate(weights, kept, [5]).item() == pytest.approx(1.2275148628, abs=1e-10)
    assert aggregate(weights, mask, [5]).item() == pytest.approx(0.4910059451, abs=1e-10)


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_u14_nothing_to_train_is_zero_with_a_working_backward(how):
    leaf = torch.randn(5, requires_grad=True)
    loss = aggregate(leaf**2, torch.zeros(5), [2, 3], how, constant=4)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(leaf.grad, torch.zeros(5))


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_no_sequence_at_all(how):
    leaf = torch.zeros(0, requires_grad=True)
    loss = aggregate(leaf * 2, torch.zeros(0), [], how, constant=4, total=3)
    loss.backward()
    assert loss.item() == 0


def test_u13_a_dead_group_stays_in_the_denominator_and_pushes_nowhere():
    leaf = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([0.0, 0, 1, -1], dtype=torch.float64)
    loss = aggregate(-advantages * leaf, torch.ones(4), [2, 2])
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert gradient.tolist() == [0, 0, -0.25, 0.25]


def test_sequences_without_a_trained_token_count_only_by_choice():
    mask = torch.tensor([1.0, 1, 0, 0, 0, 0, 1])
    assert step_total(mask, LENGTHS, "sequence_mean").item() == 2
    assert step_total(mask, LENGTHS, "sequence_mean", count_empty=True).item() == 3
    assert aggregate(LOSSES, mask, LENGTHS, "sequence_mean").item() == pytest.approx((2 + 8) / 2)


def test_sequence_tokens_put_a_cut_sequence_together_again():
    whole = aggregate(LOSSES[2:6], ONES[2:6], [4], "sequence_mean")
    four = torch.tensor([4])
    halves = [
        aggregate(LOSSES[2 + i : 4 + i], ONES[:2], [2], "sequence_mean", total=1, sequence_tokens=four) for i in (0, 2)
    ]
    assert sum(halves).item() == whole.item()


def test_bool_and_integer_masks_are_masks():
    for mask in (torch.tensor([1, 1, 0, 0, 0, 0, 1]), torch.tensor([1, 1, 0, 0, 0, 0, 1]).bool()):
        assert aggregate(LOSSES, mask, torch.tensor(LENGTHS)).item() == 4.0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"how": "token_means"}, "token_mean"),
        ({"how": "constant"}, "constant=None"),
        ({"lengths": [2, 4]}, "sum to 6"),
        ({"mask": torch.ones(6)}, "equally long"),
        ({"mask": torch.ones(7, 1)}, "1-D"),
    ],
)
def test_bad_input_is_named(options, match):
    arguments = {"losses": LOSSES, "mask": ONES, "lengths": LENGTHS} | options
    with pytest.raises(ValueError, match=match):
        aggregate(**arguments)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(0, 1000), st.sampled_from(AGGREGATIONS))
def test_matches_a_plain_loop(lengths, seed, how):
    if sum(lengths) == 0:
        lengths = [*lengths, 1]
    batch = random_batch(seed, lengths)
    rows = zip(batch.log_probs.split(lengths), batch.mask.split(lengths), strict=True)
    kept = [[float(x) for x, m in zip(row, mask, strict=True) if m] for row, mask in rows]
    sequences = max(sum(bool(row) for row in kept), 1)
    tokens = max(sum(len(row) for row in kept), 1)
    expected = {
        "token_mean": sum(map(sum, kept)) / tokens,
        "sequence_mean": sum(sum(row) / max(len(row), 1) for row in kept) / sequences,
        "sequence_sum": sum(map(sum, kept)) / sequences,
        "constant": sum(map(sum, kept)) / 3 / sequences,
    }
    assert aggregate(batch.log_probs, batch.mask, lengths, how, constant=3).item() == pytest.approx(
        expected[how], abs=1e-12
    )
