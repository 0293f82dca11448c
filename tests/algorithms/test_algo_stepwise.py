"""Step-wise advantages."""

import pytest
import torch

from limes.algorithms.stepwise import step_wise

# two siblings with two steps each, and a stranger with one
SCORES = [1.0, 0.5, -1.0, 0.5, 3.0]
SAMPLES = [0, 0, 1, 1, 2]
INDICES = [0, 1, 0, 1, 0]
SPANS = [(0, 2), (3, 4), (0, 1), (1, 3), (0, 2)]
GROUPS = [7, 7, 9]
LENGTHS = [4, 3, 2]
MASK = torch.tensor([1, 1, 0, 1, 1, 1, 1, 1, 1])


def run(**options):
    arguments = {
        "step_scores": SCORES,
        "step_samples": SAMPLES,
        "step_indices": INDICES,
        "step_spans": SPANS,
        "group_ids": GROUPS,
        "lengths": LENGTHS,
        "mask": MASK,
    } | options
    return step_wise(**arguments).tolist()


def test_steps_compete_inside_their_bucket_and_fill_their_span():
    with pytest.warns(UserWarning, match="one valid sample"):
        assert run(eps=0) == [1, 1, 0, 0, -1, 0, 0, 0, 0]


def test_a_bucket_of_one_follows_the_named_rule():
    assert run(eps=0, singletons="raw") == [1, 1, 0, 0, -1, 0, 0, 3, 3]
    with pytest.raises(ValueError, match="one valid sample"):
        run(singletons="error")


def test_outcomes_join_the_scores_before_the_comparison():
    result = run(outcomes=[1, 0, 0], std="none", singletons="raw")
    assert result == [1.5, 1.5, 0, 0.5, -1.5, -0.5, -0.5, 3, 3]
    half = run(outcomes=[1, 0, 0], outcome_coef=0.5, std="none", singletons="raw")
    assert half == [1.25, 1.25, 0, 0.25, -1.25, -0.25, -0.25, 3, 3]


def test_an_unscored_step_or_outcome_is_outside_every_statistic():
    scores = [1.0, 0.5, None, 0.5, 3.0]
    assert run(step_scores=scores, singletons="raw", std="none") == [1, 1, 0, 0, 0, 0, 0, 3, 3]
    assert run(outcomes=[1, None, 0], singletons="raw", std="none") == [2, 2, 0, 1.5, 0, 0, 0, 3, 3]
    assert run(valid=[1, 1, 0, 1, 1], singletons="raw", std="none") == [1, 1, 0, 0, 0, 0, 0, 3, 3]


def test_the_mask_wins_over_a_span():
    mask = MASK.clone()
    mask[0] = 0
    assert run(mask=mask, singletons="raw", eps=0)[:3] == [0, 1, 0]


def test_order_of_steps_does_not_matter():
    order = [4, 2, 0, 3, 1]
    shuffled = run(
        step_scores=[SCORES[i] for i in order],
        step_samples=[SAMPLES[i] for i in order],
        step_indices=[INDICES[i] for i in order],
        step_spans=[SPANS[i] for i in order],
        singletons="raw",
    )
    assert shuffled == run(singletons="raw")


def test_no_step_at_all():
    empty = {"step_scores": [], "step_samples": [], "step_indices": [], "step_spans": []}
    assert run(**empty) == [0] * 9


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"step_spans": [(0, 2), (1, 4), (0, 1), (1, 3), (0, 2)]}, "overlap"),
        ({"step_spans": [(0, 2), (3, 5), (0, 1), (1, 3), (0, 2)]}, r"step 1: span \[3, 5\]"),
        ({"step_spans": [(0, 2), (3, 3), (0, 1), (1, 3), (0, 2)]}, "does not fit"),
        ({"step_samples": [0, 0, 1, 1, 3]}, "0 .. 2"),
        ({"step_indices": [0, 1]}, "equally long"),
    ],
)
def test_bad_steps_are_named(options, match):
    with pytest.raises(ValueError, match=match):
        run(singletons="raw", **options)
