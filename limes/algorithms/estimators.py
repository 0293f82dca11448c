"""Advantage estimators by name: rewards of the whole rollout in, advantages of this rank's tokens out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from limes.algorithms.advantages import group_relative, leave_one_out, per_token
from limes.algorithms.choices import choose
from limes.algorithms.groups import Ids, Rewards, Valid, scored
from limes.algorithms.packed import Lengths, check_packed, repeat_per_token, select, trained_lengths
from limes.algorithms.returns import discounted_returns, gae, shaped_rewards
from limes.algorithms.stepwise import step_wise
from limes.algorithms.whitening import Moments, measure, whiten


@dataclass(frozen=True)
class Steps:
    """Scored steps of this rank's samples and their siblings; see `stepwise.step_wise` for the fields."""

    scores: Rewards
    samples: Ids
    indices: Ids
    spans: Tensor | Sequence[tuple[int, int]]
    valid: Valid = None


@dataclass(frozen=True)
class EstimatorInputs:
    """What an estimator may look at; `[num_tokens]` tensors lie on one device.

    Attributes:
        rewards: every sample of the rollout in global order; None and NaN are unscored.
        group_ids: likewise.
        lengths: response tokens of this rank's samples.
        mask: `[num_tokens]` this rank's tokens, not 0 on trained ones.
        partition: global positions of this rank's samples; None says that they are all of them.
        valid: every sample of the rollout, false for samples outside every statistic: failed ones, and those without a
            trained token. None for all; without a partition, samples without a trained token are seen from the mask.
        kl: `[num_tokens]` KL to the reference, or None.
        values: `[num_tokens]` of the critic, or None.
        steps: scored steps, or None. A group's steps must all be on one rank.
    """

    rewards: Rewards
    group_ids: Ids
    lengths: Lengths
    mask: Tensor
    partition: Sequence[int] | None = None
    valid: Valid = None
    kl: Tensor | None = None
    values: Tensor | None = None
    steps: Steps | None = None


@dataclass(frozen=True)
class EstimatorSettings:
    """Numbers and choices of the estimators; each estimator reads those it knows.

    Attributes:
        std, eps, singletons: as in `advantages.group_relative`.
        kl_coef: weight of the KL in the reward.
        gamma, lambd: as in `returns.gae`.
        outcome_coef: as in `stepwise.step_wise`.
        normalize_advantages: whiten over the tokens of the step. REINFORCE++ always does.
        unbiased: whiten with n - 1.
    """

    std: str = "sample"
    eps: float = 1e-6
    singletons: str = "zero"
    kl_coef: float = 0.0
    gamma: float = 1.0
    lambd: float = 1.0
    outcome_coef: float = 1.0
    normalize_advantages: bool = False
    unbiased: bool = True


@dataclass(frozen=True)
class Estimator:
    """One row of the table.

    Attributes:
        estimate: (inputs, settings) -> advantages and returns, `[num_tokens]` float64, before whitening.
        whitens: whitening is part of the method.
        kl_in_reward: `kl_coef` has a meaning here.
        needs: inputs that must be there.
    """

    estimate: Callable[[EstimatorInputs, EstimatorSettings], tuple[Tensor, Tensor]]
    whitens: bool = False
    kl_in_reward: bool = False
    needs: tuple[str, ...] = ()


def estimate(
    estimator: str | Estimator,
    inputs: EstimatorInputs,
    settings: EstimatorSettings | None = None,
    *,
    merge: Callable[[Moments], Moments] = lambda moments: moments,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of this rank's tokens.

    Args:
        estimator: a name in `ESTIMATORS`, or a row of one's own.
        inputs: rewards and tokens.
        settings: None is the defaults.
        merge: turns this rank's moments into those of all ranks, for whitening; every rank calls it once, or none does.
        dtype: of the results.

    Returns:
        Two detached `[num_tokens]` tensors, 0 under the mask and on the tokens of invalid samples.

    Raises:
        ValueError: unknown name, an input missing, a `kl_coef` that this estimator would ignore, or results that are
            not one number a token.
    """
    settings = settings or EstimatorSettings()
    row = estimator if isinstance(estimator, Estimator) else choose(ESTIMATORS, estimator, "advantage_estimator")
    _check(_name_of(row), row, inputs, settings)
    inputs = _without_invalid(inputs)
    advantages, returns = row.estimate(inputs, settings)
    check_packed(advantages=advantages, returns=returns, mask=inputs.mask)
    advantages, returns = select(advantages.detach(), inputs.mask), select(returns.detach(), inputs.mask)
    if row.whitens or settings.normalize_advantages:
        whole = merge(measure(advantages, inputs.mask))
        advantages = whiten(advantages, inputs.mask, unbiased=settings.unbiased, moments=whole)
    return advantages.to(dtype), returns.to(dtype)


def _name_of(row: Estimator) -> str:
    return next((name for name, entry in ESTIMATORS.items() if entry is row), "of one's own")


def _check(name: str, row: Estimator, inputs: EstimatorInputs, settings: EstimatorSettings) -> None:
    missing = [need for need in row.needs if getattr(inputs, need) is None]
    if missing:
        raise ValueError(f"advantage_estimator={name!r} needs {' and '.join(missing)}")
    if settings.kl_coef and not row.kl_in_reward:
        able = ", ".join(other for other, entry in ESTIMATORS.items() if entry.kl_in_reward)
        raise ValueError(
            f"kl_coef={settings.kl_coef}: advantage_estimator={name!r} has no KL in its reward; set kl_coef to 0 and "
            f"use kl_loss_coef, or choose one of {able}"
        )


def _without_invalid(inputs: EstimatorInputs) -> EstimatorInputs:
    """The same inputs with every reason to leave a sample out in `valid`, and its tokens out of the mask."""
    rewards, valid = scored(inputs.rewards, inputs.valid)
    if inputs.partition is None:
        valid = valid & (trained_lengths(inputs.mask, inputs.lengths) > 0).to(valid.device)
    own = repeat_per_token(_own(valid, inputs), inputs.lengths, inputs.mask.numel())
    return replace(inputs, rewards=rewards, valid=valid, mask=(inputs.mask != 0) & own)


def _own(per_sample: Tensor, inputs: EstimatorInputs) -> Tensor:
    """The entries of this rank's samples, on the tokens' device."""
    own = per_sample if inputs.partition is None else per_sample[torch.as_tensor(inputs.partition, dtype=torch.int64)]
    return own.to(inputs.mask.device)


def _same_on_all_tokens(per_sample: Tensor, inputs: EstimatorInputs) -> tuple[Tensor, Tensor]:
    tokens = per_token(_own(per_sample, inputs), inputs.lengths, inputs.mask)
    return tokens, tokens


def _token_rewards(inputs: EstimatorInputs, settings: EstimatorSettings) -> Tensor:
    rewards, _ = scored(inputs.rewards, None)
    return shaped_rewards(_own(rewards, inputs), inputs.kl, inputs.lengths, inputs.mask, kl_coef=settings.kl_coef)


def _grpo(inputs: EstimatorInputs, settings: EstimatorSettings) -> tuple[Tensor, Tensor]:
    relative = group_relative(
        inputs.rewards,
        inputs.group_ids,
        std=settings.std,
        eps=settings.eps,
        valid=inputs.valid,
        singletons=settings.singletons,
    )
    return _same_on_all_tokens(relative, inputs)


def _rloo(inputs: EstimatorInputs, settings: EstimatorSettings) -> tuple[Tensor, Tensor]:
    relative = leave_one_out(inputs.rewards, inputs.group_ids, valid=inputs.valid, singletons=settings.singletons)
    return _same_on_all_tokens(relative, inputs)


def _reinforce_plus_plus(inputs: EstimatorInputs, settings: EstimatorSettings) -> tuple[Tensor, Tensor]:
    returns = discounted_returns(_token_rewards(inputs, settings), inputs.lengths, inputs.mask, gamma=settings.gamma)
    return returns, returns


def _reinforce_plus_plus_baseline(inputs: EstimatorInputs, settings: EstimatorSettings) -> tuple[Tensor, Tensor]:
    tokens, _ = _grpo(inputs, replace(settings, std="none"))
    if inputs.kl is not None:
        tokens = tokens - select(inputs.kl.detach().double() * settings.kl_coef, inputs.mask)
    return tokens, tokens


def _ppo(inputs: EstimatorInputs, settings: EstimatorSettings) -> tuple[Tensor, Tensor]:
    assert inputs.values is not None
    rewards = _token_rewards(inputs, settings)
    values = inputs.values.double()
    return gae(rewards, values, inputs.lengths, inputs.mask, gamma=settings.gamma, lambd=settings.lambd)


def _step_wise(inputs: EstimatorInputs, settings: EstimatorSettings) -> tuple[Tensor, Tensor]:
    assert inputs.steps is not None
    steps = inputs.steps
    rewards, valid = scored(inputs.rewards, inputs.valid)
    tokens = step_wise(
        steps.scores,
        steps.samples,
        steps.indices,
        steps.spans,
        _own(torch.as_tensor(inputs.group_ids), inputs),
        inputs.lengths,
        inputs.mask,
        outcomes=_own(torch.where(valid, rewards, float("nan")), inputs),
        outcome_coef=settings.outcome_coef,
        std=settings.std,
        eps=settings.eps,
        singletons=settings.singletons,
        valid=steps.valid,
    )
    return tokens, tokens


ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {
        "grpo": Estimator(_grpo),
        "rloo": Estimator(_rloo),
        "reinforce_plus_plus": Estimator(_reinforce_plus_plus, whitens=True, kl_in_reward=True),
        "reinforce_plus_plus_baseline": Estimator(_reinforce_plus_plus_baseline, whitens=True, kl_in_reward=True),
        "ppo": Estimator(_ppo, kl_in_reward=True, needs=("values",)),
        "step_wise": Estimator(_step_wise, needs=("steps",)),
    }
)
"""Estimators by name. Dr.GRPO is `grpo` with `std="none"`; DAPO is `grpo` with its own clip, aggregation and filter."""
