"""Intervals of clustered means and of proportions."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limes.rollout.statistics import clustered_half_width, proportion_interval, student_t


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (7, 2.3646), (15, 2.1314), (63, 1.9983), (1000, 1.9623)],
)
def test_student_t_is_the_tabled_quantile(freedom: int, quantile: float) -> None:
    assert student_t(freedom) == pytest.approx(quantile, rel=2e-3)


def test_clusters_of_one_give_the_ordinary_interval() -> None:
    values = [1.0, 0.0, 0.0, 1.0, 1.0]
    spread = (sum((v - 0.6) ** 2 for v in values) / 4 / 5) ** 0.5
    assert clustered_half_width(values, range(5)) == pytest.approx(2.7764 * spread, rel=2e-3)


def test_copies_of_an_answer_add_no_certainty() -> None:
    once = clustered_half_width([1.0, 0.0, 1.0], [0, 1, 2])
    often = clustered_half_width([1.0, 0.0, 1.0] * 8, [0, 1, 2] * 8)
    assert often == pytest.approx(once)


def test_one_prompt_has_no_interval() -> None:
    assert clustered_half_width([1.0, 0.0, 1.0], [7, 7, 7]) is None
    assert clustered_half_width([], []) is None


def test_the_clustered_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Hard and easy prompts, 8 answers each: intervals of 16 prompts should hold the mean about 19 in 20 times."""
    rng = random.Random(1)
    covered = plain_covered = 0
    for _ in range(400):
        values, clusters = [], []
        for prompt in range(16):
            chance = rng.choice([0.1, 0.9])
            values += [float(rng.random() < chance) for _ in range(8)]
            clusters += [prompt] * 8
        error = abs(sum(values) / len(values) - 0.5)
        covered += error <= (clustered_half_width(values, clusters) or 0.0)
        plain_covered += error <= (clustered_half_width(values, range(len(values))) or 0.0)
    assert 0.9 <= covered / 400 <= 0.99
    assert plain_covered / 400 < 0.75


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_a_proportion_interval_holds_the_mean_and_stays_in_bounds(values: list[float]) -> None:
    low, high = proportion_interval(values)
    mean = sum(values) / len(values)
    assert 0 <= low <= mean + 1e-9
    assert mean - 1e-9 <= high <= 1
    assert low < high


def test_all_right_is_not_certainty() -> None:
    low, high = proportion_interval([1.0] * 16)
    assert (low, high) == (pytest.approx(0.8064, abs=1e-4), 1.0)


def test_yes_no_values_give_wilsons_interval() -> None:
    """10 of 20: Wilson (0.2993, 0.7007) at n; the n-1 spread takes one trial off."""
    low, high = proportion_interval([1.0, 0.0] * 10)
    assert low == pytest.approx(0.2937, abs=2e-3)
    assert high == pytest.approx(0.7063, abs=2e-3)
