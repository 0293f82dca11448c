"""Whitening: T14, U25, U26."""

import math

import pytest
import torch

from limes.algorithms.advantages import whiten
from limes.algorithms.whitening import Moments, measure, merge_moments

VALUES = torch.tensor([1, math.nan, 3, 5], dtype=torch.float64)
MASK = torch.tensor([1, 0, 1, 1])


@pytest.mark.parametrize(
    ("unbiased", "expected"), [(False, [-1.2247448714, 0, 0, 1.2247448714]), (True, [-1, 0, 0, 1])]
)
def test_t14_u26_nan_under_the_mask(unbiased, expected):
    assert whiten(VALUES, MASK, unbiased=unbiased).tolist() == pytest.approx(expected, abs=1e-10)
    square = whiten(VALUES.reshape(2, 2), MASK.reshape(2, 2), unbiased=unbiased)
    assert square.flatten().tolist() == pytest.approx(expected, abs=1e-10)


def test_default_is_unbiased():
    assert whiten(VALUES, MASK).tolist() == pytest.approx([-1, 0, 0, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_values_are_exactly_zero(dtype):
    assert whiten(torch.full((7,), 0.7, dtype=dtype), torch.ones(7)).tolist() == [0] * 7
    assert whiten(torch.tensor([0.7]), torch.ones(1)).tolist() == [0]


def test_nothing_masked_in():
    assert whiten(torch.tensor([math.nan, 2]), torch.zeros(2)).tolist() == [0, 0]
    assert whiten(torch.zeros(0), torch.zeros(0)).tolist() == []


def test_tiny_spread_is_floored_and_not_blown_up():
    assert whiten(torch.tensor([0.0, 1e-9], dtype=torch.float64), torch.ones(2)).abs().max() < 1e-4
    assert whiten(torch.tensor([0.0, 1e-9], dtype=torch.float64), torch.ones(2), eps=0).abs().max() > 0.7


def test_without_shift_only_the_scale_changes():
    result = whiten(torch.tensor([1.0, 3, 5]), torch.ones(3), shift_mean=False)
    assert result.tolist() == pytest.approx([0.5, 1.5, 2.5])


@pytest.mark.parametrize("cut", [0, 1, 37, 99, 100])
def test_u25_two_ranks_whiten_like_one(cut):
    generator = torch.Generator().manual_seed(0)
    values = 1000 + torch.randn(100, generator=generator, dtype=torch.float64)
    mask = torch.rand(100, generator=generator) < 0.6
    parts = [(values[:cut], mask[:cut]), (values[cut:], mask[cut:])]
    sent = [measure(v, m).pack() for v, m in parts]
    whole = merge_moments([Moments.unpack(packed) for packed in sent])
    joined = torch.cat([whiten(v, m, moments=whole) for v, m in parts])
    torch.testing.assert_close(joined, whiten(values, mask), rtol=0, atol=1e-10)


def test_local_statistics_on_each_rank_are_another_thing():
    values, ones = torch.tensor([1.0, 3, 5, 20], dtype=torch.float64), torch.ones(2)
    local = torch.cat([whiten(values[:2], ones), whiten(values[2:], ones)])
    assert not torch.allclose(local, whiten(values, torch.ones(4)))


def test_equal_values_on_both_ranks_are_exactly_zero():
    parts = [torch.full((n,), 0.7, dtype=torch.float64) for n in (3, 4)]
    whole = merge_moments([measure(part, torch.ones_like(part)) for part in parts])
    assert whiten(parts[0], torch.ones(3), moments=whole).tolist() == [0, 0, 0]


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="mask of shape"):
        whiten(torch.ones(3), torch.ones(3, 1))
