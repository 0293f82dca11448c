"""The reference of the KL: a policy that stays behind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from limes.config import Config
from limes.models.policy import Policy
from limes.records import Sample
from limes.training.checkpoint import load_weights, save_weights
from limes.training.frozen import copy_frozen, copy_weights, load_frozen, scorer

FOLDER = "reference"
"""The reference's part of a checkpoint folder; there is one once it has been updated."""


class Reference:
    """Scores tokens as `model.ref_path` does, or as the actor did at its start.

    The actor itself serves until it is about to move; only then is it copied. What the worker calls is `score`,
    `before_step`, `rollout_done`, `save` and `load`: an actor with adapters can serve for good, with them turned off.
    """

    def __init__(self, actor: Policy, config: Config) -> None:
        self._actor, self._config = actor, config
        self._interval = config.algorithm.ref_update_interval
        path = config.model.ref_path
        self._own = None if path is None else load_frozen(config, "model.ref_path", path, actor)
        self._updated = False

    @property
    def is_actor(self) -> bool:
        """The actor's tensors are also the reference's."""
        return self._own is None

    def score(self, samples: Sequence[Sample]) -> Tensor:
        """Log-probs of the samples' response tokens, `[T]`."""
        forward = scorer(self._own or self._actor, self._config)
        return forward.score(samples, self._config.trainer.max_tokens_per_micro_batch)

    def before_step(self) -> None:
        """The actor is about to move: keep what it was."""
        if self._own is None:
            self._own = copy_frozen(self._actor)

    def rollout_done(self, rollout_id: int) -> None:
        """Catch up with the actor where `algorithm.ref_update_interval` says so."""
        if self._interval is None or (rollout_id + 1) % self._interval:
            return
        self._updated = True
        if self._own is not None:
            copy_weights(self._own, self._actor)

    def save(self, folder: Path) -> None:
        """Write what a run that goes on from `folder` could not know: weights from the middle of a run."""
        if self._updated:
            save_weights(folder / FOLDER, self._own or self._actor)

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote; call it before the actor's weights are replaced."""
        self.before_step()
        if (folder / FOLDER).exists():
            assert self._own is not None
            load_weights(folder / FOLDER, self._own)
            self._updated = True


def build_reference(actor: Policy, config: Config) -> Reference | None:
    """The reference, where a KL to one is asked for.

    Raises:
        ValueError: `model.ref_path` cannot be loaded, or is of another vocabulary.
    """
    wanted = config.algorithm.needs_reference or config.model.ref_path is not None
    return Reference(actor, config) if wanted else None
