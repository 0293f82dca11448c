"""Settings of evaluation."""

from typing import Literal

from pydantic import Field, PositiveInt

from limes.config.base import Section


class EvalConfig(Section):
    """Evaluation before, during and after training; unset sampling values are the rollout's."""

    interval: PositiveInt | None = None
    """Evaluate after every so many rollouts and at each epoch's end; absent means never."""

    prompt_data: str | None = None
    """Evaluation prompts, written like `data.prompt_data`; default: the training prompts."""

    num_prompts: PositiveInt | None = 64
    """Use the first so many prompts."""

    n_samples_per_prompt: PositiveInt = 1
    """Answers drawn for each prompt."""

    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature; 0 is greedy."""

    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus; 1 keeps all."""

    top_k: Literal[-1] | PositiveInt | None = None
    """Most likely tokens kept; -1 keeps all."""

    max_response_len: PositiveInt | None = None
    """Longest answer in tokens."""

    skip_before_train: bool = False
    """Leave out the evaluation before the first rollout."""
