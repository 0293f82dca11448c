"""The advantage estimator of a run, built from its settings, and the scored steps of all its samples."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from limes.algorithms.estimators import ESTIMATORS, Estimator, EstimatorInputs, EstimatorSettings, Steps
from limes.config.algorithm import AlgorithmConfig
from limes.records import Sample
from limes.rewards.function import import_function
from limes.rollout.steps import STEP_WISE, read_steps


def build_estimator(algorithm: AlgorithmConfig) -> tuple[Estimator, EstimatorSettings]:
    """The estimator and its settings.

    Raises:
        ValueError: a function of the user's that cannot be imported.
    """
    name = algorithm.advantage_estimator
    # the rollout's remarks tell a person of singletons
    quiet = name in ESTIMATORS and algorithm.singletons == "zero"
    settings = EstimatorSettings(
        std=algorithm.advantage_std,
        eps=algorithm.advantage_eps,
        singletons="zero_quietly" if quiet else algorithm.singletons,
        kl_coef=algorithm.kl_coef,
        gamma=algorithm.gamma,
        lambd=algorithm.lambd,
        outcome_coef=algorithm.outcome_coef,
        normalize_advantages=bool(algorithm.normalize_advantages),
    )
    return ESTIMATORS[name] if name in ESTIMATORS else _own(name), settings


def steps_of(samples: Sequence[Sample]) -> Steps | None:
    """The scored steps of samples; None where samples know of none.

    Raises:
        ValueError: an entry that is malformed, see `read_steps`.
    """
    scores: list[float | None] = []
    owners: list[int] = []
    indices: list[int] = []
    spans: list[tuple[int, int]] = []
    for position, sample in enumerate(samples):
        steps = read_steps(sample)
        if steps is not None:
            scores += steps.scores
            owners += [position] * len(steps.scores)
            indices += steps.indices
            spans += steps.spans
    known = not samples or any(STEP_WISE in sample.metadata for sample in samples)
    return Steps(scores, owners, indices, spans) if known else None


def describe_result(found: object) -> str:
    """What a function of the user's returned, in a few words."""
    if isinstance(found, Tensor):
        return f"a tensor of shape {list(found.shape)}"
    if isinstance(found, tuple):
        return f"({', '.join(map(describe_result, found))})"
    return f"a {type(found).__name__}"


def _own(name: str) -> Estimator:
    """An estimator of the user's: (inputs, settings) -> advantages, or advantages and returns."""
    function = import_function(name, "algorithm.advantage_estimator")

    def estimate(inputs: EstimatorInputs, settings: EstimatorSettings) -> tuple[Tensor, Tensor]:
        found = function(inputs, settings)
        pair = (found, found) if isinstance(found, Tensor) else found
        if not isinstance(pair, tuple) or [getattr(part, "shape", None) for part in pair] != [inputs.mask.shape] * 2:
            raise ValueError(
                f"algorithm.advantage_estimator = {name} returned {describe_result(found)}; it must return a tensor of "
                f"{inputs.mask.numel()} numbers, one a token, or two of them: advantages and returns"
            )
        return pair

    return Estimator(estimate, kl_in_reward=True)
