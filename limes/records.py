"""The records that travel between rooms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Message = dict[str, Any]
Reward = float | dict[str, Any] | None


class Status(StrEnum):
    """How far a sample has come."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(slots=True)
class Sample:
    """One trainable token sequence: a prompt and the answer grown on it.

    Per-token lists cover the response only and are always `response_length` long. `loss_mask` is 1 exactly on tokens
    that the engine sampled and that should train; where it is 0, `rollout_log_probs` is 0 and means nothing. Answers
    that were given and not sampled (`algorithm.loss = sft`) have mask 1 and NaN there.
    """

    index: int
    group_index: int
    rollout_id: int | None = None
    prompt: str | list[Message] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    loss_mask: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    status: Status = Status.PENDING
    reward: Reward = None
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return len(self.tokens) - self.response_length

    @property
    def response_tokens(self) -> list[int]:
        """Token ids of the answer."""
        return self.tokens[self.prompt_length :]

    def append_tokens(
        self,
        tokens: Sequence[int],
        *,
        log_probs: Sequence[float] | None = None,
        weight_versions: Sequence[int] | None = None,
        trainable: bool = True,
    ) -> None:
        """Grow the response. Sampled tokens bring a log-prob and a weight version each; others (tool output, template
        glue) bring neither and are masked out.

        Raises:
            ValueError: the lists differ in length, or trainable tokens lack log-probs or versions.
        """
        num = len(tokens)
        if trainable and (log_probs is None or weight_versions is None):
            raise ValueError("sampled tokens need log_probs and weight_versions; pass trainable=False for other tokens")
        if not trainable:
            last_version = self.weight_versions[-1] if self.weight_versions else 0
            log_probs, weight_versions = [0.0] * num, [last_version] * num
        assert log_probs is not None
        assert weight_versions is not None
        if len(log_probs) != num or len(weight_versions) != num:
            raise ValueError(f"{num} tokens, {len(log_probs)} log_probs, {len(weight_versions)} weight_versions")
        self.tokens.extend(tokens)
        self.loss_mask.extend([int(trainable)] * num)
        self.rollout_log_probs.extend(log_probs)
        self.weight_versions.extend(weight_versions)
        self.response_length += num
        self.check()

    def check(self) -> None:
        """Assert that all per-token lists agree."""
        lengths = (len(self.loss_mask), len(self.rollout_log_probs), len(self.weight_versions))
        assert lengths == (self.response_length,) * 3, f"sample {self.index}: {lengths}, not {self.response_length}"
        assert self.response_length <= len(self.tokens), f"sample {self.index}: response longer than its tokens"


Group = list[Sample]


@dataclass(slots=True)
class TrainShard:
    """What one data-parallel rank trains on in one rollout.

    `samples` are this rank's own and `partition` their global positions. The other lists cover every sample of the
    rollout in global order, so that group statistics and loss denominators never depend on the cut.
    """

    rollout_id: int
    samples: list[Sample]
    partition: list[int]
    rewards: list[float | None]
    group_ids: list[int]
    num_trained_tokens: list[int]


def step_bounds(num_samples: int, num_steps: int) -> list[int]:
    """Borders of the global positions of each optimizer step of a rollout."""
    return [round(i * num_samples / num_steps) for i in range(num_steps + 1)]
