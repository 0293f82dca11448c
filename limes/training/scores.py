"""What is known of a rollout's tokens before its first optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from limes.algorithms import kl
from limes.config import Config
from limes.models.policy import Policy
from limes.records import Sample
from limes.training.forward import PackedForward
from limes.training.frozen import load_frozen, scorer
from limes.training.reference import build_reference


@dataclass(frozen=True)
class Scores:
    """Log-probs by several models, `[T]` each; None where nobody asks.

    Attributes:
        old: of the policy.
        ref: of the reference.
        teacher: of the teacher.
        kl: estimate of the KL of policy and reference that is in the reward.
    """

    old: Tensor | None = None
    ref: Tensor | None = None
    teacher: Tensor | None = None
    kl: Tensor | None = None


class TokenScorer:
    """The models beside the actor, and what they and the actor say of a rollout.

    Args:
        forward: runs the actor.
        needs_old: the loss wants the actor's own log-probs ahead of the first step.

    Attributes:
        reference: of the KL, or None.

    Raises:
        ValueError: a model that cannot be loaded, or of another vocabulary than the actor's.
    """

    def __init__(self, actor: Policy, config: Config, forward: PackedForward, *, needs_old: bool) -> None:
        self._config, self._forward = config, forward
        self.reference = build_reference(actor, config)
        path = config.teacher.path
        self._teacher = None if path is None else scorer(load_frozen(config, "teacher.path", path, actor), config)
        self._needs_old = needs_old or path is not None or bool(config.algorithm.kl_coef)
        self._latest: tuple[int, Scores] | None = None

    def score(self, rollout_id: int, samples: Sequence[Sample]) -> Scores:
        """Scores of a rollout's response tokens; asked again for the same rollout, they are there."""
        if self._latest is None or self._latest[0] != rollout_id:
            self._latest = rollout_id, self._scores(samples)
        return self._latest[1]

    def forget(self) -> None:
        """The actor is about to move: the latest scores are no longer its own."""
        self._latest = None

    def _scores(self, samples: Sequence[Sample]) -> Scores:
        algorithm, room = self._config.algorithm, self._config.trainer.max_tokens_per_micro_batch
        old = self._forward.score(samples, room) if self._needs_old else None
        ref = None
        if self.reference is not None:
            ref = old if old is not None and self.reference.is_actor else self.reference.score(samples)
        penalty = None
        if algorithm.kl_coef:
            assert old is not None
            assert ref is not None
            penalty = kl.penalty(old, ref, algorithm.kl_loss_type or "k1")
        return Scores(old, ref, None if self._teacher is None else self._teacher.score(samples, room), penalty)
