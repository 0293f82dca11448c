"""What samples and a user's estimator bring to the advantages."""

import pytest
import torch

from limes.algorithms.estimators import EstimatorInputs, EstimatorSettings, estimate
from limes.config.algorithm import AlgorithmConfig
from limes.records import Sample
from limes.training.estimator import build_estimator, steps_of

STEPS = {"step_scores": [1.0, 0.5], "step_token_spans": [[0, 2], [2, 3]]}


def stepped(**entry: object) -> Sample:
    return Sample(index=4, group_index=0, response_length=3, metadata={"step_wise": {**STEPS, **entry}})


def test_steps_of_samples() -> None:
    found = steps_of([Sample(index=0, group_index=0), stepped(), stepped(step_indices=[3, 5])])
    assert found is not None
    assert (found.samples, found.indices) == ([1, 1, 2, 2], [0, 1, 3, 5])
    assert found.spans == [(0, 2), (2, 3), (0, 2), (2, 3)]
    assert steps_of([Sample(index=0, group_index=0)]) is None


def test_a_rank_or_rollout_without_scored_samples_has_no_steps_and_no_fault() -> None:
    """Whatever a grader does to all answers, the run goes on."""
    no_tokens = torch.empty(0, dtype=torch.int64)
    inputs = EstimatorInputs(
        [None, None], [0, 0], [], no_tokens, partition=[], valid=[False, False], steps=steps_of([])
    )
    advantages, _ = estimate("step_wise", inputs)
    assert advantages.numel() == 0
    empty = steps_of([stepped(step_scores=[], step_token_spans=[])])
    assert estimate("step_wise", EstimatorInputs([1.0], [0], [3], torch.ones(3), steps=empty))[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"step_token_spans": [[0, 2]]}, "sample 4: .* has 2 step_scores, 2 step_indices and 1 step_token_spans"),
        ({"step_indices": [0]}, "2 step_scores, 1 step_indices"),
    ],
)
def test_lists_that_differ_in_length_name_the_sample(entry: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        steps_of([stepped(**entry)])


def test_a_missing_list_is_named() -> None:
    sample = Sample(index=4, group_index=0, metadata={"step_wise": {"step_scores": [1.0]}})
    with pytest.raises(ValueError, match=r"sample 4: .* has no step_token_spans"):
        steps_of([sample])


def test_an_estimator_without_its_inputs_is_named_where_it_comes_as_a_row() -> None:
    row, settings = build_estimator(AlgorithmConfig(advantage_estimator="step_wise"))
    with pytest.raises(ValueError, match="'step_wise' needs steps"):
        estimate(row, EstimatorInputs([1.0], [0], [3], torch.ones(3)), settings)


def as_list(inputs: EstimatorInputs, settings: EstimatorSettings) -> list[float]:
    return [0.0] * inputs.mask.numel()


def too_short(inputs: EstimatorInputs, settings: EstimatorSettings) -> torch.Tensor:
    return torch.zeros(inputs.mask.numel() - 1)


def one_of_two(inputs: EstimatorInputs, settings: EstimatorSettings) -> tuple[torch.Tensor, None]:
    return torch.zeros(inputs.mask.numel()), None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("as_list", "a list; it must return a tensor of 3"),
        ("too_short", r"a tensor of shape \[2\]"),
        ("one_of_two", r"\(a tensor of shape \[3\], a NoneType\)"),
    ],
)
def test_what_a_users_estimator_may_not_return(name: str, words: str) -> None:
    row, settings = build_estimator(AlgorithmConfig(advantage_estimator=f"{__name__}:{name}"))
    with pytest.raises(ValueError, match=f"algorithm.advantage_estimator = .*{name} returned {words}"):
        estimate(row, EstimatorInputs([1.0], [0], [3], torch.ones(3)), settings)


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
@pytest.mark.filterwarnings("error")
def test_a_run_has_remarks_and_no_python_warning_for_groups_of_one(name: str) -> None:
    row, settings = build_estimator(AlgorithmConfig(advantage_estimator=name))
    advantages, _ = estimate(row, EstimatorInputs([1.0], [0], [3], torch.ones(3)), settings)
    assert advantages.tolist() == [0, 0, 0]
