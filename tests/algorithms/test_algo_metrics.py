"""Metrics: T11, and reductions that do not depend on the cut."""

import itertools
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from maths_proofs import random_batch, random_cut

from limes.algorithms.metrics import (
    effective_sample_size,
    merge,
    pass_at_k,
    quantile,
    reduce_tokens,
    weight_sums,
    zero_variance_groups,
)
from limes.algorithms.policy_loss import clipped


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [(4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 1, 4, 1), (8, 3, 4, 0.9285714286), (10, 2, 5, 0.7777777778), (8, 0, 4, 0)],
)
def test_t11_pass_at_k(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-10)


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_resampling_with_replacement_is_another_number():
    assert pytest.approx(0.68359375) == 1 - (3 / 4) ** 4
    assert pass_at_k(4, 1, 4) != pytest.approx(0.68359375)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, 1, 5), (4, -1, 1), (4, 1, 0)])
def test_impossible_counts_are_named(n, c, k):
    with pytest.raises(ValueError, match=f"n={n}, c={c}, k={k}"):
        pass_at_k(n, c, k)


def test_reductions_do_not_depend_on_the_cut():
    batch = random_batch(0)

    def parts(cut):
        for sequences in itertools.chain(*cut):
            b = batch.take(sequences)
            _, metrics = clipped(b.log_probs, b.old_log_probs, b.advantages, eps_clip=0.2, mask=b.mask)
            yield reduce_tokens(metrics, b.mask)

    whole = merge(parts([[list(range(7))]]))
    chosen = batch.mask != 0
    ratio = (batch.log_probs - batch.old_log_probs).exp()[chosen]
    assert whole["ratio"].result == pytest.approx(float(ratio.mean()), abs=1e-12)
    assert whole["ratio_max"].result == pytest.approx(float(ratio.max()), abs=1e-12)
    rng = random.Random(0)
    for _ in range(20):
        cut = merge(parts(random_cut(7, rng)))
        assert {k: v.result for k, v in cut.items()} == pytest.approx(
            {k: v.result for k, v in whole.items()}, abs=1e-12
        )


def test_u123_maxima_and_means_of_uneven_parts():
    one = reduce_tokens({"x": torch.tensor([10.0]), "x_max": torch.tensor([10.0])}, torch.ones(1))
    three = reduce_tokens({"x": torch.tensor([30.0, 2, 2]), "x_max": torch.tensor([30.0, 2, 2])}, torch.ones(3))
    whole = merge([one, three])
    assert whole["x"].result == 11
    assert whole["x_max"].result == 30


def test_poison_under_the_mask_reaches_no_metric():
    values = torch.tensor([1.0, math.nan, 3.0])
    parts = reduce_tokens({"x": values, "x_max": values}, torch.tensor([1, 0, 1]))
    assert parts["x"].result == 2
    assert parts["x_max"].result == 3
    assert quantile(values, torch.tensor([1, 0, 1]), 0.5) == 2
    assert weight_sums(values, torch.tensor([1, 0, 1])).tolist() == [2, 4, 10]


def test_a_metric_of_nothing_has_no_value():
    parts = reduce_tokens({"x": torch.ones(2), "x_max": torch.ones(2)}, torch.zeros(2))
    assert parts["x"].result is None
    assert parts["x_max"].result is None
    assert quantile(torch.ones(2), torch.zeros(2), 0.5) is None
    assert effective_sample_size(weight_sums(torch.ones(2), torch.zeros(2))) is None


@pytest.mark.parametrize("q", [0.0, 0.3, 0.5, 0.99, 1.0])
def test_quantile_interpolates_as_torch_does(q):
    values = torch.randn(37, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert quantile(values, torch.ones(37), q) == pytest.approx(float(values.quantile(q)), abs=1e-12)


def test_effective_sample_size():
    assert effective_sample_size(weight_sums(torch.full((5,), 0.3), torch.ones(5))) == pytest.approx(1)
    assert effective_sample_size(weight_sums(torch.tensor([1.0, 0, 0, 0]), torch.ones(4))) == pytest.approx(0.25)
    parts = weight_sums(torch.tensor([1.0, 2]), torch.ones(2)) + weight_sums(torch.tensor([3.0]), torch.ones(1))
    assert effective_sample_size(parts) == pytest.approx(36 / (3 * 14))


def test_zero_variance_groups_go_by_equality_and_by_outcome():
    seven = torch.full((7,), 0.7)
    assert zero_variance_groups([1, 1, 0, 1, 0.5], [0, 0, 1, 1, 2]) == (2, 3)
    assert zero_variance_groups(torch.cat([seven, seven]), [0] * 7 + [1] * 7) == (2, 2)
    assert zero_variance_groups([1, None, 0, 5], [0, 0, 0, 1], valid=[1, 1, 1, 0]) == (0, 1)
    assert zero_variance_groups([0.1 + 0.2, 0.3], [0, 0]) == (0, 1)
