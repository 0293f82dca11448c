"""The advantage estimator of a run, built from its settings, and the scored steps that samples bring along."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from limes.algorithms.estimators import ESTIMATORS, Estimator, EstimatorInputs, EstimatorSettings, Steps
from limes.config.algorithm import AlgorithmConfig
from limes.records import Sample
from limes.rewards.function import import_function

STEP_WISE = "step_wise"
"""Entry of `Sample.metadata`: `step_scores`, one a step; `step_token_spans`, first token of the response and one past
the last; and `step_indices`, by default 0, 1, 2 and so on."""


def build_estimator(algorithm: AlgorithmConfig) -> tuple[Estimator, EstimatorSettings]:
    """The estimator and its settings.

    Raises:
        ValueError: a function of the user's that cannot be imported.
    """
    settings = EstimatorSettings(
        std=algorithm.advantage_std,
        eps=algorithm.advantage_eps,
        singletons=algorithm.singletons,
        kl_coef=algorithm.kl_coef,
        gamma=algorithm.gamma,
        lambd=algorithm.lambd,
        outcome_coef=algorithm.outcome_coef,
        normalize_advantages=bool(algorithm.normalize_advantages),
    )
    name = algorithm.advantage_estimator
    return ESTIMATORS[name] if name in ESTIMATORS else _own(name), settings


def steps_of(samples: Sequence[Sample]) -> Steps | None:
    """The scored steps of samples; None where no sample has any."""
    scores: list[float | None] = []
    owners: list[int] = []
    indices: list[int] = []
    spans: list[tuple[int, int]] = []
    for position, sample in enumerate(samples):
        entry = sample.metadata.get(STEP_WISE)
        if entry is None:
            continue
        num = len(entry["step_scores"])
        scores += entry["step_scores"]
        owners += [position] * num
        indices += entry.get("step_indices", range(num))
        spans += [(start, end) for start, end in entry["step_token_spans"]]
    return Steps(scores, owners, indices, spans) if scores else None


def _own(name: str) -> Estimator:
    """An estimator of the user's: (inputs, settings) -> advantages, or advantages and returns."""
    function = import_function(name, "algorithm.advantage_estimator")

    def estimate(inputs: EstimatorInputs, settings: EstimatorSettings) -> tuple[Tensor, Tensor]:
        found = function(inputs, settings)
        advantages, returns = (found, found) if isinstance(found, Tensor) else found
        return advantages, returns

    return Estimator(estimate, kl_in_reward=True)
