"""A rollout manager from the settings: graders, filter, sampling values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from limes.config import Config
from limes.config.rollout import SamplingConfig
from limes.engine.protocol import Engine, SamplingParams
from limes.rewards import build_grader
from limes.rollout.filters import load_filter
from limes.rollout.manager import RolloutManager
from limes.rollout.prompts import Prompts
from limes.rollout.sampling import Sampler
from limes.run import Console

if TYPE_CHECKING:
    from limes.models.policy import TextModel


def build_rollout_manager(
    config: Config, policy: TextModel, engine: Engine, prompts: Prompts, *, samples_folder: Path, console: Console
) -> RolloutManager:
    """Start the grader and put the manager together.

    Args:
        policy: whose tokenizer and end tokens shape requests and text.

    Raises:
        ValueError: grader or filter cannot be had, or the model does not know a stop token; names setting, value and
            fix.
    """
    unknown = [token for token in config.rollout.stop_token_ids if token >= policy.vocab_size]
    if unknown:
        raise ValueError(
            f"rollout.stop_token_ids holds {unknown[0]}, and the model knows ids 0 .. {policy.vocab_size - 1}; "
            "leave it out"
        )
    keep = load_filter(
        config.rollout.dynamic_sampling_filter,
        reward_key=config.reward.key,
        leave_out_truncated=config.algorithm.truncated == "mask",
    )
    grader = build_grader(config.reward)

    def sampler(sampling: SamplingConfig, purpose: str) -> Sampler:
        return Sampler(
            engine,
            grader,
            decode=lambda token_ids: policy.tokenizer.decode(token_ids, skip_special_tokens=True),
            sampling=sampling_params(sampling, policy.end_token_ids),
            timeout_s=config.rollout.sample_timeout_s,
            reward_key=config.reward.key,
            whole_groups=config.reward.group,
            purpose=purpose,
        )

    return RolloutManager(
        config,
        engine=engine,
        grader=grader,
        sampler=sampler(config.rollout, "rollout"),
        eval_sampler=sampler(config.eval_sampling(), "eval"),
        cursor=prompts.cursor,
        keep=keep,
        questions=prompts.questions,
        samples_folder=samples_folder,
        console=console,
    )


def sampling_params(sampling: SamplingConfig, end_token_ids: Sequence[int]) -> SamplingParams:
    """Every value of a request; the model's end tokens end an answer beside the settings' own."""
    return SamplingParams(
        max_new_tokens=sampling.max_response_len,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        min_new_tokens=sampling.min_new_tokens,
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(dict.fromkeys([*end_token_ids, *sampling.stop_token_ids])),
    )
