"""Rewards to advantages: T2, T3 and the rows of that name."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from limes.algorithms.advantages import (
    group_relative,
    leave_one_out,
    per_token,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from limes.algorithms.metrics import zero_variance_groups

POPULATION, SAMPLE, RLOO = "population", "sample", "rloo"
T2 = {
    (1, 0, 0, 1): {
        "none": [0.5, -0.5, -0.5, 0.5],
        POPULATION: [1, -1, -1, 1],
        SAMPLE: [0.8660254038, -0.8660254038, -0.8660254038, 0.8660254038],
        RLOO: [0.6666666667, -0.6666666667, -0.6666666667, 0.6666666667],
        "first": (0.8660239038, 0.8658754298),
    },
    (1, 0, 0, 0): {
        "none": [0.75, -0.25, -0.25, -0.25],
        POPULATION: [1.7320508076, -0.5773502692, -0.5773502692, -0.5773502692],
        SAMPLE: [1.5, -0.5, -0.5, -0.5],
        RLOO: [1, -0.3333333333, -0.3333333333, -0.3333333333],
        "first": (1.499997, 1.49970006),
    },
    (0.1, 0.5, 0.9, 0.2): {
        "none": [-0.325, 0.075, 0.475, -0.225],
        POPULATION: [-1.0441851276, 0.2409657987, 1.5261167249, -0.7228973960],
        SAMPLE: [-0.9042908467, 0.2086825031, 1.3216558529, -0.6260475093],
        RLOO: [-0.4333333333, 0.1, 0.6333333333, -0.3],
        "first": (-0.9042883306, -0.9040393038),
    },
    (1, 1, 1, 1, 1, 1, 1, 0): {
        "none": [0.125] * 7 + [-0.875],
        POPULATION: [0.3779644730] * 7 + [-2.6457513111],
        SAMPLE: [0.3535533906] * 7 + [-2.4748737342],
        RLOO: [0.1428571429] * 7 + [-1],
        "first": (0.3535523906, 0.3534534189),
    },
    (5, 5, 5): {"none": [0] * 3, POPULATION: [0] * 3, SAMPLE: [0] * 3, RLOO: [0] * 3, "first": (0, 0)},
}


@pytest.mark.parametrize("rewards", T2)
@pytest.mark.parametrize("std", ["none", POPULATION, SAMPLE])
def test_t2_group_relative(rewards, std):
    result = group_relative(list(rewards), [3] * len(rewards), std=std, eps=0)
    assert result.tolist() == pytest.approx(T2[rewards][std], abs=1e-10)


@pytest.mark.parametrize("rewards", T2)
def test_t2_epsilons(rewards):
    for eps, expected in zip((1e-6, 1e-4), T2[rewards]["first"], strict=True):
        assert group_relative(list(rewards), [0] * len(rewards), eps=eps)[0].item() == pytest.approx(expected, abs=1e-8)
    default = group_relative(list(rewards), [0] * len(rewards))
    assert torch.equal(default, group_relative(list(rewards), [0] * len(rewards), std="sample", eps=1e-6))


@pytest.mark.parametrize("rewards", T2)
def test_t2_leave_one_out(rewards):
    result = leave_one_out(list(rewards), [0] * len(rewards))
    assert result.tolist() == pytest.approx(T2[rewards][RLOO], abs=1e-10)


def test_t2_uneven_groups_keep_to_themselves():
    rewards, ids = [1, 2, 3, 4, 5, 5, 5, 1, 1, 0, 0], [0] * 4 + [1] * 3 + [2] * 4
    far, near, last = 1.1618950039, 0.3872983346, 0.8660254038
    expected = [-far, -near, near, far, 0, 0, 0, last, last, -last, -last]
    result = group_relative(rewards, ids, eps=0)
    assert result.tolist() == pytest.approx(expected, abs=1e-10)
    assert result[4:7].tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("estimator", [group_relative, leave_one_out])
def test_u16_equal_rewards_are_exactly_zero(estimator, dtype):
    rewards = torch.full((7,), 0.7, dtype=dtype)
    result = estimator(rewards, [0] * 7)
    assert result.tolist() == [0.0] * 7
    assert result.dtype == dtype
    assert zero_variance_groups(rewards, [0] * 7) == (1, 1)


def test_u18_one_loser_keeps_the_group_alive():
    assert zero_variance_groups([0.0] + [0.95] * 7, [0] * 8) == (0, 1)


def test_u19_an_invalid_sample_is_outside_the_baseline():
    result = group_relative([1, 0, 10], [0, 0, 0], std="none", valid=[True, True, False])
    assert result.tolist() == [0.5, -0.5, 0]
    baseline = reinforce_plus_plus_baseline([1, 0, 10], [0] * 3, [1, 1, 1], torch.tensor([1, 1, 0]), whiten=False)
    assert baseline.tolist() == [0.5, -0.5, 0]


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_u21_u22_an_unscored_sample_is_not_zero_and_not_contagious(missing):
    result = group_relative([1, 0, missing, 1, 3, 1], [0, 0, 0, 0, 1, 1], std="none")
    assert result.tolist() == pytest.approx([1 / 3, -2 / 3, 0, 1 / 3, 1, -1])
    assert leave_one_out([1, 0, missing, 1], [0] * 4).tolist() == pytest.approx([0.5, -1, 0, 0.5])


def test_u23_a_group_of_one_says_so():
    with pytest.warns(UserWarning, match="1 groups have one valid sample"):
        assert group_relative([5, 1, 0], [0, 1, 1], std="none").tolist() == [0, 0.5, -0.5]
    with pytest.warns(UserWarning, match="one valid sample"):
        assert leave_one_out([5], [0]).tolist() == [0]
    assert group_relative([5, 1, 0], [0, 1, 1], std="none", singletons="raw").tolist() == [5, 0.5, -0.5]
    with pytest.raises(ValueError, match="n_samples_per_prompt"):
        group_relative([5, 1, 0], [0, 1, 1], singletons="error")


def test_u24_none_means_no_scaling_at_all():
    assert group_relative([1, 0, 0, 1], [0] * 4, std="none").tolist() == [0.5, -0.5, -0.5, 0.5]
    for spelling in ("false", "off", "None", ""):
        with pytest.raises(ValueError, match="std="):
            group_relative([1, 0], [0, 0], std=spelling)


def test_u28_an_excluded_row_changes_nobody():
    for estimator in (group_relative, leave_one_out):
        three = estimator([1.0, 0, 0.5], [0] * 3)
        four = estimator([1.0, 100, 0, 0.5], [0] * 4, valid=[True, False, True, True])
        assert torch.equal(four[[0, 2, 3]], three)
        assert four[1] == 0


def test_t3_reinforce_plus_plus_with_kl_in_the_reward():
    kl = torch.tensor([0.2, -0.1, 0.3], dtype=torch.float64)
    result = reinforce_plus_plus([1.0], kl, [3], torch.ones(3), kl_coef=0.1, gamma=1, whiten=False)
    assert result.tolist() == pytest.approx([0.96, 0.98, 0.97], abs=1e-12)
    whitened = reinforce_plus_plus([1.0], kl, [3], torch.ones(3), kl_coef=0.1, gamma=1)
    assert whitened.tolist() == pytest.approx([-1, 1, 0], abs=1e-10)


@pytest.mark.parametrize(
    ("unbiased", "expected"),
    [(False, [0.5773502692, -1.7320508076] + [0.5773502692] * 2), (True, [0.5, -1.5, 0.5, 0.5])],
)
def test_t3_sequence_level(unbiased, expected):
    options = {"kl_coef": 0.0, "gamma": 1.0, "unbiased": unbiased}
    result = reinforce_plus_plus([1, 0, 1, 1], None, [1] * 4, torch.ones(4), **options)
    assert result.tolist() == pytest.approx(expected, abs=1e-10)


def test_t3_baseline():
    def run(lengths, **options):
        mask = torch.ones(sum(lengths))
        tokens = reinforce_plus_plus_baseline([1, 0, 1, 1], [0, 0, 1, 1], lengths, mask, **options)
        firsts = [sum(lengths[:i]) for i in range(4)]
        return tokens[firsts].tolist()

    assert run([1] * 4, whiten=False) == [0.5, -0.5, 0, 0]
    assert run([1] * 4, unbiased=False) == pytest.approx([1.4142135624, -1.4142135624, 0, 0], abs=1e-10)
    assert run([1] * 4) == pytest.approx([1.2247448714, -1.2247448714, 0, 0], abs=1e-10)
    weighted = [1.4596008984, -1.8766297265, -0.2085144141, -0.2085144141]
    assert run([2, 1, 1, 4], unbiased=False) == pytest.approx(weighted, abs=1e-10)


def test_baseline_with_kl_subtracts_it_before_whitening():
    kl = torch.tensor([0.2, 99, 0.4, 0.1], dtype=torch.float64)
    mask = torch.tensor([1, 0, 1, 1])
    tokens = reinforce_plus_plus_baseline([1, 0], [0, 0], [2, 2], mask, kl=kl, kl_coef=0.5, whiten=False)
    assert tokens.tolist() == pytest.approx([0.4, 0, -0.7, -0.55])


def test_reinforce_plus_plus_leaves_unscored_samples_out():
    mask = torch.ones(4)
    with_none = reinforce_plus_plus([1.0, None, 0.0], None, [1, 2, 1], mask, kl_coef=0.0, gamma=1.0)
    without = reinforce_plus_plus([1.0, 0.0], None, [1, 1], torch.ones(2), kl_coef=0.0, gamma=1.0)
    assert with_none[[0, 3]].tolist() == without.tolist()
    assert with_none[1:3].tolist() == [0, 0]


def test_shaping_leaves_its_inputs_as_they_were():
    rewards, kl = torch.tensor([1.0, 0]), torch.tensor([0.2, 0.1, 0.3])
    before = rewards.clone(), kl.clone()
    reinforce_plus_plus(rewards, kl, [2, 1], torch.ones(3), kl_coef=0.1, gamma=0.9)
    assert torch.equal(rewards, before[0])
    assert torch.equal(kl, before[1])


def test_per_token_spreads_over_masked_in_tokens():
    result = per_token(torch.tensor([1.5, -2]), [2, 3], torch.tensor([1, 0, 1, 1, 0]))
    assert result.tolist() == [1.5, 0, -2, -2, 0]


def test_bad_rewards_are_named():
    with pytest.raises(ValueError, match="infinite reward"):
        group_relative([1.0, float("inf")], [0, 0])
    with pytest.raises(ValueError, match="2 rewards came with 3 group ids"):
        group_relative([1.0, 0.0], [0, 0, 0])
    with pytest.raises(ValueError, match="equally long"):
        group_relative([1.0, 0.0], [0, 0], valid=[True])
    assert group_relative([1.0, float("inf"), 0], [0] * 3, std="none", valid=[1, 0, 1]).tolist() == [0.5, 0, -0.5]
    assert group_relative([], []).tolist() == []


group_lists = st.lists(
    st.tuples(st.sampled_from([0.0, 0.7, 1.0, -2.5, 1 / 3]), st.integers(0, 3), st.booleans()), min_size=1, max_size=20
)


@settings(max_examples=50, deadline=None)
@given(group_lists, st.randoms(use_true_random=False), st.sampled_from(["sample", "population", "none"]))
def test_p3_shuffling_and_renaming_moves_advantages_with_their_samples(samples, random, std):
    def run(rows, rename):
        rewards, ids, valid = zip(*rows, strict=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            new_ids = [rename[i] for i in ids]
            return group_relative(rewards, new_ids, std=std, valid=valid), leave_one_out(rewards, new_ids, valid=valid)

    order = list(range(len(samples)))
    random.shuffle(order)
    rename = random.sample(range(-50, 50), 4)
    for before, after in zip(run(samples, range(4)), run([samples[i] for i in order], rename), strict=True):
        assert torch.equal(after, before[order])


@settings(max_examples=50, deadline=None)
@given(group_lists)
def test_centred_advantages_sum_to_zero_and_match_a_plain_loop(samples):
    rewards, ids, valid = zip(*samples, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = group_relative(rewards, ids, std="population", eps=0.5, valid=valid)
        rloo = leave_one_out(rewards, ids, valid=valid)
    for i, (reward, group, is_valid) in enumerate(samples):
        peers = [r for r, g, v in samples if g == group and v]
        if not is_valid or len(set(peers)) < 2:
            assert result[i] == 0
            assert rloo[i] == 0
            continue
        mean = sum(peers) / len(peers)
        spread = (sum((r - mean) ** 2 for r in peers) / len(peers)) ** 0.5
        others = (sum(peers) - reward) / (len(peers) - 1)
        assert result[i].item() == pytest.approx((reward - mean) / (spread + 0.5), abs=1e-12)
        assert rloo[i].item() == pytest.approx(reward - others, abs=1e-12)
