"""Settings of generation."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from limes.config.base import Section


class SamplingConfig(Section):
    """How tokens are drawn; every default is neutral."""

    temperature: float = Field(default=1.0, ge=0)
    """Logits are divided by this; 0 takes the most likely token (evaluation only)."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the smallest set of tokens whose probability reaches this; 1 keeps all."""

    top_k: Literal[-1] | PositiveInt = -1
    """Keep this many most likely tokens; -1 keeps all."""

    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Drop tokens below this share of the most likely token's probability; 0 drops none."""

    max_response_len: PositiveInt = 256
    """Longest answer in tokens."""

    min_new_tokens: int = Field(default=0, ge=0)
    """Stop tokens cannot be drawn before this many tokens."""

    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Strings that end an answer; their tokens stay in it."""

    stop_token_ids: list[NonNegativeInt] = Field(default_factory=list)
    """Token ids that end an answer, beside the model's own end tokens."""


class RolloutConfig(SamplingConfig):
    """How many prompts and answers a rollout has and how its answers are drawn."""

    num_rollout: int | None = Field(default=None, ge=0)
    """Number of rollouts (generate, then train); 0 evaluates only. One of this and `num_epoch` is needed; this one
    wins."""

    num_epoch: PositiveInt | None = None
    """Number of passes over the prompt data, when `num_rollout` is absent."""

    batch_size: PositiveInt = 8
    """Prompts (groups) a rollout ends with."""

    n_samples_per_prompt: PositiveInt = 8
    """Answers drawn for each prompt: the size of a group."""

    over_sampling_batch_size: PositiveInt | None = None
    """Prompts in flight while a dynamic filter drops groups; at least `batch_size`, which is the default."""

    dynamic_sampling_filter: str | None = None
    """Groups to drop and replace: `nonzero_std` (rewards all equal) or `module:function`, which takes a list of
    samples and returns (keep, reason)."""

    max_refill_rounds: PositiveInt = 10
    """A rollout whose filter has dropped this many times `batch_size` groups ends with an error."""

    sample_timeout_s: PositiveFloat = 3600.0
    """One answer, its reward included, may take this long; later it is marked FAILED and counted."""
