"""What is said of a step beside its line."""

import pytest

from limes.run.tracking import without_number, without_signal

SCORED = {"rollout/trained_samples": 8.0, "rollout/zero_std_frac": 1.0}


@pytest.mark.parametrize(
    ("train", "rollout", "words"),
    [
        ({"train/skipped": 1.0}, SCORED, "in every group all rewards are equal"),
        ({"train/skipped": 1.0}, SCORED | {"rollout/zero_std_frac": 0.5}, "no trained token has an advantage"),
        ({"train/skipped": 1.0}, {}, "no trained token has an advantage"),
    ],
)
def test_a_training_that_moved_nothing_is_called_no_signal(train: dict, rollout: dict, words: str) -> None:
    assert without_signal(train, rollout) == [f"no signal: {words}, so this step moves nothing"]


@pytest.mark.parametrize(
    ("train", "rollout"),
    [
        ({"train/loss": 0.1}, SCORED),  # reinforce_plus_plus, ppo, a teacher: equal groups, and yet it trained
        (SCORED, SCORED),  # the rollout's own report
        ({"train/skipped": 1.0}, {"rollout/trained_samples": 0.0}),  # said already: nothing to train on
    ],
)
def test_a_training_that_moved_something_is_not(train: dict, rollout: dict) -> None:
    assert without_signal(train, rollout) == []


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"train/nonfinite_advantages": 0.5, "train/nonfinite_losses": 0.5}, ": 50.00% of the advantages (algorithm."),
        (
            {"train/nonfinite_losses": 0.25},
            ": 25.00% of the token losses (algorithm.policy_loss, or the model itself) are",
        ),
        ({"train/loss": float("nan")}, ": the losses of all tokens are finite, and what algorithm.aggregation makes"),
        ({"train/loss": 1.0}, "moved nothing"),
    ],
)
def test_a_gradient_that_is_not_finite_is_told_with_where_it_begins(metrics: dict, words: str) -> None:
    (remark,) = without_number(metrics | {"train/nonfinite_grads": 2.0})
    assert remark.startswith("2 gradients not finite, so 2 optimizer steps moved nothing")
    assert words in remark
    assert without_number(metrics | {"train/nonfinite_grads": 0.0}) == []
