"""Returns and GAE: T7, U29, U30, U32, U33."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from maths_proofs import prove_observations_do_not_exist

from limes.algorithms.advantages import gae
from limes.algorithms.returns import discounted_returns, shaped_rewards

REWARDS = torch.tensor([0, 0, 1], dtype=torch.float64)
VALUES = torch.tensor([0.5, 0.6, 0.7], dtype=torch.float64)
ONES = torch.ones(3)


@pytest.mark.parametrize(
    ("gamma", "lambd", "expected"),
    [
        (1, 0.95, [0.46575, 0.385, 0.3]),
        (0.99, 0.95, [0.446828575, 0.37515, 0.3]),
        (1, 1, [0.5, 0.4, 0.3]),
        (1, 0, [0.1, 0.1, 0.3]),
    ],
)
def test_t7a(gamma, lambd, expected):
    advantages, returns = gae(REWARDS, VALUES, [3], ONES, gamma=gamma, lambd=lambd)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-12)
    assert returns.tolist() == pytest.approx([a + v for a, v in zip(expected, VALUES.tolist(), strict=True)], abs=1e-12)


def test_t7b_u29_a_value_on_a_padding_slot_bootstraps_nobody():
    values = torch.tensor([0, 0, 100], dtype=torch.float64)
    rewards = torch.tensor([0, 1, 0], dtype=torch.float64)
    advantages, returns = gae(rewards, values, [3], torch.tensor([1, 1, 0]), gamma=1, lambd=0.95)
    assert advantages.tolist() == pytest.approx([0.95, 1, 0])
    assert returns.tolist() == pytest.approx([0.95, 1, 0])


def test_t7c_u30_observations_do_not_exist():
    for gamma, lambd in ((1.0, 0.95), (0.9, 0.8), (1.0, 1.0)):
        prove_observations_do_not_exist(lambda r, v, n, m, g=gamma, x=lambd: gae(r, v, n, m, gamma=g, lambd=x))


def test_u30_the_outcome_lands_on_the_last_sampled_token_not_on_the_tool_output_after_it():
    mask = torch.tensor([1, 0, 1, 0])
    rewards = shaped_rewards(torch.tensor([2.0]), None, [4], mask, kl_coef=0.0)
    assert rewards.tolist() == [0, 0, 2, 0]
    assert discounted_returns(rewards, [4], mask, gamma=0.5).tolist() == [1, 0, 2, 0]


def test_u32_kl_under_the_mask_has_no_effect():
    kl = torch.tensor([0.2, 99, 0.3])
    shaped = shaped_rewards(torch.tensor([1.0]), kl, [3], torch.tensor([1, 0, 1]), kl_coef=0.1)
    assert shaped.tolist() == pytest.approx([-0.02, 0, 0.97])
    kl[1] = math.nan
    assert torch.equal(shaped, shaped_rewards(torch.tensor([1.0]), kl, [3], torch.tensor([1, 0, 1]), kl_coef=0.1))


def test_u33_shaping_writes_into_nothing_it_was_given():
    rewards, kl = torch.tensor([1.0, 2]), torch.tensor([0.2, -0.1, 0.3])
    copies = rewards.clone(), kl.clone()
    shaped = shaped_rewards(rewards, kl, [1, 2], torch.ones(3), kl_coef=0.5)
    assert shaped.tolist() == pytest.approx([0.9, 0.05, 1.85])
    assert torch.equal(rewards, copies[0])
    assert torch.equal(kl, copies[1])


def test_a_fully_masked_sequence_and_an_empty_one():
    mask = torch.tensor([0, 0, 1])
    advantages, returns = gae(REWARDS, VALUES, [2, 0, 1], mask, gamma=1, lambd=1)
    assert advantages.tolist() == pytest.approx([0, 0, 0.3])
    assert returns.tolist() == [0, 0, 1]
    assert shaped_rewards(torch.tensor([5.0, 6, 7]), None, [2, 0, 1], mask, kl_coef=0.0).tolist() == [0, 0, 7]


def test_equal_returns_are_equal_to_the_bit():
    rewards = shaped_rewards(torch.tensor([0.7]), torch.zeros(1000), [1000], torch.ones(1000), kl_coef=0.1)
    assert discounted_returns(rewards, [1000], torch.ones(1000), gamma=1.0).unique().numel() == 1


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.integers(0, 10_000),
    st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    st.sampled_from([0.0, 0.95, 1.0]),
)
def test_gae_is_the_recursion(lengths, seed, gamma, lambd):
    generator = torch.Generator().manual_seed(seed)
    num = sum(lengths)
    rewards, values = torch.randn(2, num, generator=generator, dtype=torch.float64)
    mask = torch.rand(num, generator=generator) < 0.7
    advantages, returns = gae(rewards, values, lengths, mask, gamma=gamma, lambd=lambd)
    start = 0
    for length in lengths:
        following, next_value = 0.0, 0.0
        for t in reversed(range(start, start + length)):
            if not mask[t]:
                assert advantages[t] == 0
                assert returns[t] == 0
                continue
            following = rewards[t] + gamma * next_value - values[t] + gamma * lambd * following
            next_value = values[t]
            assert advantages[t].item() == pytest.approx(float(following), abs=1e-10)
            assert returns[t].item() == pytest.approx(float(following + values[t]), abs=1e-10)
        start += length
