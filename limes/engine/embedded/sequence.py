"""What the engine knows of a prompt and of an answer that grows from it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from limes.engine.protocol import GenerateRequest, GenerateResult, OnToken


def _no_slots() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


@dataclass(eq=False)
class Prompt:
    """A prompt, computed once for all its answers.

    Attributes:
        pages: pages held, empty while nothing is computed.
        slots: cache slot of each token.
        num_computed: tokens whose keys and values are stored.
        last_hidden: final hidden state of the last token, `[E]`, once all are computed.
        num_users: answers, waiting or running, that grow from it.
        order: prompts are numbered as they come, so that batches have a fixed order.
    """

    token_ids: tuple[int, ...]
    order: int = 0
    pages: list[int] = field(default_factory=list)
    slots: np.ndarray = field(default_factory=_no_slots)
    num_computed: int = 0
    last_hidden: Tensor | None = None
    num_users: int = 0

    @property
    def ready(self) -> bool:
        """All tokens are computed."""
        return self.last_hidden is not None


@dataclass(eq=False)
class Answer:
    """One answer: its request, its tokens so far and where their keys are.

    `num_computed` counts own tokens whose keys and values are stored; while running it is one less than `token_ids`
    holds, since the newest token is computed in the next step.
    """

    request: GenerateRequest
    prompt: Prompt
    future: Future[GenerateResult]
    on_token: OnToken | None
    end_token_ids: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    slots: np.ndarray = field(default_factory=_no_slots)
    num_computed: int = 0

    @property
    def num_uncomputed(self) -> int:
        """Own tokens that still need a forward pass."""
        return len(self.token_ids) - self.num_computed

    @property
    def position(self) -> int:
        """Response position of the next token: what its noise is keyed by."""
        return self.request.first_position + len(self.token_ids)
