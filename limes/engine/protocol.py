"""What every engine speaks: token ids in, token ids with log-probs and weight versions out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class RequestRefused(ValueError):
    """A request that the engine can never serve; the message holds the numbers."""


class EngineError(RuntimeError):
    """The engine failed while serving; the message names the cause."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Every value that shapes the sampling distribution; nothing is filled in from a model folder.

    `temperature` 0 is greedy; its log-probs are those of temperature 1. `top_k` -1 and `top_p` 1 are off.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleKey:
    """Names a sample's noise: the noise of a token is a function of this key and the token's position alone."""

    seed: int
    rollout_id: int
    sample_index: int


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One answer to sample. `first_position` is the number of response tokens that `prompt_ids` already ends with."""

    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    key: SampleKey
    first_position: int = 0


@dataclass(slots=True)
class GenerateResult:
    """A finished (or aborted) answer; the three lists are equally long.

    `log_probs` are under the distribution each token was sampled from, after temperature and cuts.
    A stop token or the tokens of a stop string stay in `token_ids`.
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.ABORT


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """A snapshot of an engine."""

    alive: bool
    paused: bool
    num_running: int
    num_waiting: int
    kv_tokens_used: int
    kv_tokens_total: int
    resident: frozenset[str]
    weight_version: int
    error: str | None = None


PauseMode = Literal["abort", "retract", "in_place"]
OnToken = Callable[[int, float], None]


class Engine(Protocol):
    """Token in, token out. All calls may come from any event loop."""

    async def generate(self, request: GenerateRequest, on_token: OnToken | None = None) -> GenerateResult:
        """Sample one answer. `on_token(token_id, log_prob)` is called from the engine's thread for each token.

        Raises:
            RequestRefused: the request can never fit.
            EngineError: the engine died.
        """
        ...

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """End the named requests, or all, with what they have so far."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. `abort` ends running answers, `retract` frees their KV, `in_place` keeps it."""
        ...

    async def resume(self) -> None:
        """Go on sampling."""
        ...

    async def flush_cache(self) -> None:
        """Forget all cached prefixes."""
        ...

    async def offload(self, tags: Iterable[str]) -> None:
        """Release the memory of `weights`, `kv_cache` or `cuda_graph`; the engine must be idle."""
        ...

    async def onload(self, tags: Iterable[str]) -> None:
        """Take the memory of the tags back."""
        ...

    async def weight_version(self) -> int:
        """Version of the weights that the next token is sampled with."""
        ...

    async def health(self) -> EngineHealth:
        """State, load and last error."""
        ...

    async def close(self) -> None:
        """End the engine; running answers end as aborted."""
        ...
