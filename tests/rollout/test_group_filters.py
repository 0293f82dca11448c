"""Which groups are worth training on."""

import sys
import types

import numpy as np
import pytest
from rollout_fakes import new_sample

from limes.records import Group, Sample, Status
from limes.rollout.filters import load_filter, nonzero_std


def group_of(rewards: list, status: Status = Status.COMPLETED) -> Group:
    group = [new_sample(index) for index in range(len(rewards))]
    for sample, reward in zip(group, rewards, strict=True):
        sample.reward, sample.status = reward, status
    return group


def test_equal_rewards_have_no_spread_whatever_rounding_says() -> None:
    """U16: the float32 standard deviation of seven times 0.7 is 6.4e-8, not 0."""
    rewards = [float(np.float32(0.7))] * 7
    assert np.std(np.array(rewards, dtype=np.float32), ddof=1) > 0
    assert nonzero_std(group_of(rewards)) == (False, "all rewards 0.7")


def test_one_loser_keeps_all_eight() -> None:
    """U18."""
    group = group_of([0.0] + [0.95] * 7)
    assert nonzero_std(group) == (True, "")
    assert len(group) == 8


def test_the_outcome_decides_and_not_what_shapes_it() -> None:
    """U36: four wrong answers whose length bonus differs have nothing to teach."""
    shaped = [{"score": 0.1 * i, "outcome": 0.0} for i in range(4)]
    assert nonzero_std(group_of(shaped)) == (False, "all rewards 0")
    other_parts = [{"score": 0.0, "length_bonus": 0.1 * i} for i in range(4)]
    assert nonzero_std(group_of(other_parts)) == (False, "all rewards 0")
    assert nonzero_std(group_of(other_parts), reward_key="length_bonus")[0]


def test_unscored_and_failed_answers_do_not_count() -> None:
    group = group_of([1.0, None, 1.0, 0.0])
    group[3].status = Status.FAILED
    assert nonzero_std(group) == (False, "all rewards 1")
    assert nonzero_std(group_of([None, None])) == (False, "no scored answer")


def test_truncated_answers_count_unless_they_are_left_out_of_training() -> None:
    group = group_of([1.0, 1.0, 0.0])
    group[2].status = Status.TRUNCATED
    assert nonzero_std(group)[0]
    assert nonzero_std(group, leave_out_truncated=True) == (False, "all rewards 1")


def test_a_trajectory_of_several_samples_counts_once() -> None:
    """U76: nested or told by its execution id, one reward a trajectory."""
    first, second, third = group_of([1.0, 1.0, 0.0])
    assert nonzero_std([[first, second], third])[0]
    first.rollout_id = second.rollout_id = 5
    third.rollout_id = 6
    assert nonzero_std([[first, second], [third]])[0]
    third.reward = 1.0
    assert not nonzero_std([[first, second], [third]])[0]


@pytest.fixture
def user_filters(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("users_group_filters")
    monkeypatch.setitem(sys.modules, "users_group_filters", module)
    return module


def test_a_function_of_the_users_decides(user_filters: types.ModuleType) -> None:
    def short_only(group: list[Sample]) -> tuple[bool, str]:
        return len(group) < 3, "long"

    user_filters.short_only = short_only
    keep = load_filter("users_group_filters:short_only", reward_key=None, leave_out_truncated=False)
    assert keep is not None
    assert keep(group_of([1.0, 1.0])) == (True, "long")
    assert keep(group_of([1.0] * 3)) == (False, "long")


def test_a_filter_that_raises_costs_the_group_and_says_why(user_filters: types.ModuleType) -> None:
    def broken(group: list[Sample]) -> bool:
        return group[0].metadata["x"]

    user_filters.broken = broken
    keep = load_filter("users_group_filters:broken", reward_key=None, leave_out_truncated=False)
    assert keep is not None
    assert keep(group_of([1.0])) == (False, "users_group_filters:broken raised KeyError: 'x'")


@pytest.mark.parametrize(
    "name", ["nonzero", "no_such_module_here:f", "json:no_such_function", "json:__name__", ":f", "json:"]
)
def test_a_filter_that_cannot_be_had_is_refused_with_the_setting(name: str) -> None:
    with pytest.raises(ValueError, match=r"^rollout\.dynamic_sampling_filter = "):
        load_filter(name, reward_key=None, leave_out_truncated=False)


def test_no_name_means_no_filter() -> None:
    assert load_filter(None, reward_key=None, leave_out_truncated=False) is None
