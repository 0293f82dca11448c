"""The loss of a run, built from its settings: ratio, trust region, correction, KL, entropy, aggregation.

The trainer calls an `Objective` and does not know what is in it. A loss, correction or aggregation gets those settings
that its signature names, so a new one is a function in `limes.algorithms` and its name in a table there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from limes.algorithms import kl
from limes.algorithms.aggregate import AGGREGATIONS, aggregate
from limes.algorithms.corrections import CORRECTIONS, kept, off_policy_sequence_mask
from limes.algorithms.metrics import Part, reduce_tokens
from limes.algorithms.objective import token_losses
from limes.algorithms.packed import ratio, trained_lengths
from limes.algorithms.policy_loss import POLICY_LOSSES, PolicyLoss
from limes.config import Config
from limes.config.algorithm import AlgorithmConfig
from limes.config.derived import effective
from limes.rewards.function import import_function
from limes.training.batch import TrainBatch
from limes.training.estimator import describe_result
from limes.training.forward import TokenOutputs

REJECTING = ("mis", "icepop")
"""Corrections whose weight can be 0."""

NAMED_ELSEWHERE = ("missing_log_probs", "train_rollout_logprob_abs_diff", "train_rollout_logprob_abs_diff_max")
"""Metrics of a correction that every run reports under a name of its own."""


@dataclass(frozen=True)
class StepTotal:
    """What an optimizer step is divided by, counted over all its samples on all ranks.

    Attributes:
        tokens: tokens that train.
        sequences: samples with such a token.
    """

    tokens: int
    sequences: int


@dataclass(frozen=True)
class BatchLoss:
    """What one micro-batch brings to an optimizer step.

    Attributes:
        loss: scalar; those of the parts add up to the step's.
        metrics: parts that merge.
        log_prob_gaps: |trainer - engine| of each trained token.
        importance: weight of each trained token, current policy over engine.
    """

    loss: Tensor
    metrics: dict[str, Part]
    log_prob_gaps: Tensor
    importance: Tensor


class Objective:
    """The loss of a run.

    Raises:
        ValueError: a function of the user's that cannot be imported, or a setting that the chosen loss does not read.
    """

    def __init__(self, config: Config) -> None:
        algorithm = config.algorithm
        self._algorithm = algorithm
        self._policy_loss = _policy_loss(algorithm)
        self._correction = CORRECTIONS[algorithm.correction]
        self._aggregate = _aggregation(config)
        low, high = algorithm.correction_window
        self._correction_settings = _accepted(
            self._correction,
            {"level": algorithm.correction_level, "low": low, "high": high, "veto": algorithm.correction_veto},
        )

    @property
    def always_trains(self) -> bool:
        """There is something to learn even where every advantage is 0."""
        return bool(self._algorithm.entropy_coef or self._algorithm.kl_loss_coef)

    @property
    def rejects(self) -> bool:
        """Tokens may leave the denominator, so it cannot be known before the log-probs are."""
        return self._algorithm.correction in REJECTING and self._algorithm.rejected_tokens == "leave"

    def needs_old_log_probs(self, num_steps: int) -> bool:
        """Log-probs from before the first of `num_steps` optimizer steps must be had before it."""
        return self.rejects or (num_steps > 1 and not self._algorithm.use_rollout_log_probs)

    def total(
        self, trained_tokens: Sequence[int], part: TrainBatch, over_ranks: Callable[[Tensor], Tensor] = lambda own: own
    ) -> StepTotal:
        """The denominator of an optimizer step.

        Args:
            trained_tokens: trained tokens of each of the step's samples on all ranks, as their masks say.
            part: this rank's samples of the step, whose tokens without an engine log-prob, or rejected by the
                correction, do not count.
            over_ranks: from this rank's count of those to that of all.
        """
        planned = trained_lengths(part.loss_mask, part.lengths)
        actual = trained_lengths(self._training_mask(part), part.lengths)
        lost = torch.stack([(planned - actual).sum(), ((planned > 0) & (actual == 0)).sum()])
        tokens, sequences = over_ranks(lost).tolist()
        return StepTotal(sum(trained_tokens) - tokens, len(trained_tokens) - sequences)

    def __call__(self, batch: TrainBatch, outputs: TokenOutputs, total: StepTotal) -> BatchLoss:
        """This micro-batch's part of the step's loss."""
        algorithm = self._algorithm
        old = outputs.log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
        from_engine = algorithm.use_rollout_log_probs or algorithm.use_decoupled_loss
        sampler = batch.rollout_log_probs if from_engine else old
        settings = {"proximal_log_probs": old} if algorithm.use_decoupled_loss else {}
        weights, mask, metrics = self._weigh(outputs.log_probs.detach(), old, sampler, batch)
        losses, token_metrics = token_losses(
            outputs.log_probs,
            sampler,
            batch.advantages,
            lengths=batch.lengths,
            mask=mask,
            policy_loss=self._policy_loss,
            settings=settings,
            weights=weights,
            ref_log_probs=batch.ref_log_probs,
            kl_loss_coef=algorithm.kl_loss_coef,
            kl_loss_type=algorithm.kl_loss_type or "low_var_kl",
            use_unbiased_kl=algorithm.use_unbiased_kl,
            entropy=outputs.entropy,
            entropy_coef=algorithm.entropy_coef,
        )
        token_metrics |= _distances(outputs.log_probs.detach(), batch) | _not_finite(losses.detach(), batch.advantages)
        metrics |= reduce_tokens(token_metrics, mask)
        loss = self._aggregate(losses, mask, batch.lengths, total)
        trained = batch.mask != 0
        gaps = (old - batch.rollout_log_probs).abs()[trained]
        importance = ratio((outputs.log_probs.detach() - batch.rollout_log_probs)[trained])
        return BatchLoss(loss, metrics, gaps, importance)

    def _weigh(
        self, log_probs: Tensor, old: Tensor, sampler: Tensor, batch: TrainBatch
    ) -> tuple[Tensor, Tensor, dict[str, Part]]:
        """Weights of the policy loss, the mask of tokens that train, and metrics."""
        weights, token_metrics = self._correct(old, batch)
        metrics = reduce_tokens(token_metrics, batch.mask)
        mask = self._after_rejection(batch.mask, weights)
        if self._algorithm.use_opsm:
            delta, lengths = self._algorithm.opsm_delta, batch.lengths
            present, token_metrics = off_policy_sequence_mask(
                log_probs, sampler, batch.advantages, delta=delta, lengths=lengths, mask=mask
            )
            weights = weights * present
            metrics |= reduce_tokens(token_metrics, mask)
        return weights, mask, metrics

    def _correct(self, old: Tensor, batch: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
        weights, metrics = self._correction(
            old, batch.rollout_log_probs, lengths=batch.lengths, mask=batch.mask, **self._correction_settings
        )
        metrics = {name: value for name, value in metrics.items() if name not in NAMED_ELSEWHERE}
        return weights, metrics | {"correction_weight": weights, "correction_weight_max": weights}

    def _after_rejection(self, mask: Tensor, weights: Tensor) -> Tensor:
        return mask * kept(weights).to(mask.dtype) if self.rejects else mask

    def _training_mask(self, part: TrainBatch) -> Tensor:
        if not self.rejects:
            return part.mask
        assert part.old_log_probs is not None, "a correction that rejects is known before the step"
        return self._after_rejection(part.mask, self._correct(part.old_log_probs, part)[0])


def _policy_loss(algorithm: AlgorithmConfig) -> PolicyLoss:
    """The loss with its settings filled in.

    Raises:
        ValueError: it cannot be imported, or does not read a setting that was given.
    """
    name = algorithm.policy_loss
    loss = POLICY_LOSSES[name] if name in POLICY_LOSSES else import_function(name, "algorithm.policy_loss")
    known = ("eps_clip", "eps_clip_high", "eps_clip_c")
    settings = _accepted(loss, {setting: getattr(algorithm, setting) for setting in known})
    for setting in known:
        value = getattr(algorithm, setting)
        if value != AlgorithmConfig.model_fields[setting].default and setting not in settings:
            raise ValueError(
                f"algorithm.{setting} = {value} has no effect with algorithm.policy_loss = {name}; leave it out"
            )
    if algorithm.use_decoupled_loss and not _accepted(loss, {"proximal_log_probs": None}):
        raise ValueError(
            f"algorithm.use_decoupled_loss = true needs a loss that takes proximal_log_probs=, and "
            f"algorithm.policy_loss = {name} does not; set it to false"
        )

    def filled_in(*args: Any, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
        found = loss(*args, **settings, **options)
        if name not in POLICY_LOSSES:
            _check_losses(found, args[0], name)
        return found

    return filled_in


def _aggregation(config: Config) -> Callable[[Tensor, Tensor, Sequence[int], StepTotal], Tensor]:
    """From token losses to a micro-batch's part of the step's loss."""
    name = config.algorithm.aggregation
    constant = float(effective(config, "algorithm.aggregation_constant"))
    if name in AGGREGATIONS:

        def built_in(losses: Tensor, mask: Tensor, lengths: Sequence[int], total: StepTotal) -> Tensor:
            count = total.tokens if name == "token_mean" else total.sequences
            return aggregate(losses, mask, lengths, name, total=count, constant=constant)

        return built_in
    function = import_function(name, "algorithm.aggregation")
    where = f"algorithm.aggregation = {name} returned"

    def own(losses: Tensor, mask: Tensor, lengths: Sequence[int], total: StepTotal) -> Tensor:
        loss = function(losses, mask, lengths, num_tokens=total.tokens, num_sequences=total.sequences)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            found = describe_result(loss)
            raise ValueError(f"{where} {found}; it must return a tensor with one number")
        if losses.requires_grad and not loss.requires_grad:
            raise ValueError(f"{where} a loss without gradient; make it from the losses it is given")
        return loss

    return own


def _check_losses(found: object, log_probs: Tensor, name: str) -> None:
    """Check what a loss of the user's returned.

    Raises:
        ValueError: names the setting, what came and what is expected.
    """
    num = log_probs.numel()
    where = f"algorithm.policy_loss = {name} returned"
    wanted = f"it must return a tensor of {num} losses, one a token, and a dict of metrics, tensors of that shape"
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)):
        raise ValueError(f"{where} {describe_result(found)}; {wanted}")
    for what, tensor in {"losses": found[0], **{f"metric {key!r}": value for key, value in found[1].items()}}.items():
        if not isinstance(tensor, Tensor) or tensor.shape != log_probs.shape:
            raise ValueError(f"{where} {describe_result(tensor)} as {what}; {wanted}")
    if log_probs.requires_grad and not found[0].requires_grad:
        raise ValueError(f"{where} losses without gradient; make them from the log-probs it is given")


def _accepted(function: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those settings that a function has keywords for."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in settings.items() if takes_all or name in parameters}


def _distances(log_probs: Tensor, batch: TrainBatch) -> dict[str, Tensor]:
    """How far the policy is from the models beside it."""
    metrics = {}
    if batch.ref_log_probs is not None:
        metrics["ref_kl"] = kl.penalty(log_probs, batch.ref_log_probs, "k1")
        metrics["ref_kl_k3"] = kl.penalty(log_probs, batch.ref_log_probs, "k3")
    if batch.teacher_log_probs is not None:
        metrics["teacher_kl"] = kl.penalty(log_probs, batch.teacher_log_probs, "k1")
    return metrics


def _not_finite(losses: Tensor, advantages: Tensor) -> dict[str, Tensor]:
    """What keeps a gradient from being finite."""
    return {
        "nonfinite_advantages": (~advantages.isfinite()).double(),
        "nonfinite_losses": (~losses.isfinite()).double(),
    }
