"""When saving and evaluation fall due."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from limes.periodic import should_run_periodic_action as due


def test_without_an_interval_nothing_is_ever_due() -> None:
    assert not any(due(i, None, 2, 5) for i in range(5))


def test_every_interval_counts_finished_rollouts() -> None:
    assert [i for i in range(10) if due(i, 3, None)] == [2, 5, 8]


def test_the_end_of_an_epoch_is_due_too() -> None:
    assert [i for i in range(12) if due(i, 5, 4)] == [3, 4, 7, 9, 11]


def test_the_last_rollout_is_due_only_where_the_run_has_a_length() -> None:
    assert [i for i in range(7) if due(i, 5, None, 7)] == [4, 6]
    assert [i for i in range(7) if due(i, 5, None)] == [4]


def test_a_jump_over_the_due_rollout_runs_the_action_once() -> None:
    """24 to 26 with interval 25: rollout 24 itself is not asked about."""
    asked = [23, 26, 27, 28]
    hits = [now for before, now in pairwise(asked) if due(now, 25, None, previous_rollout_id=before)]
    assert hits == [26]


@given(st.sets(st.integers(0, 200), min_size=2), st.integers(1, 30), st.none() | st.integers(1, 30))
def test_jumping_never_loses_or_doubles_a_period(asked: set[int], interval: int, per_epoch: int | None) -> None:
    """An action runs exactly where something fell due since the last time it was asked about."""
    ids = sorted(asked)
    singly = {i for i in range(201) if due(i, interval, per_epoch)}
    for before, now in pairwise(ids):
        fell_due = any(i in singly for i in range(before + 1, now + 1))
        assert due(now, interval, per_epoch, previous_rollout_id=before) == fell_due
