"""Rules that span several settings: each check yields one sentence a problem: setting, value, fix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from limes.config.algorithm_checks import ALGORITHM, check_aggregation
from limes.config.cluster_checks import CLUSTER
from limes.config.counting import num_of
from limes.config.derived import effective, value_of
from limes.config.parallel_checks import PARALLEL
from limes.config.sft_checks import SFT
from limes.config.weight_checks import WEIGHTS

if TYPE_CHECKING:
    from limes.config.root import Config

NEUTRAL_CUTS = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_new_tokens": 0}
"""Sampling values that leave the distribution whole; all else makes the engine sample from another policy."""


def problems(config: Config) -> list[str]:
    """All problems of a configuration. The rules of training are left out when `rollout.num_rollout` is 0."""
    training = (*COMMON, *(SFT if config.algorithm.is_supervised else POLICY))
    checks = ALWAYS if config.rollout.num_rollout == 0 else ALWAYS + training
    return [problem for check in checks for problem in check(config)]


def _length_of_run(config: Config) -> Iterator[str]:
    if config.rollout.num_rollout is None and config.rollout.num_epoch is None:
        yield "rollout.num_rollout and rollout.num_epoch are both unset; set one of them"


def _answers_fit(config: Config) -> Iterator[str]:
    minimum, context, kv = config.rollout.min_new_tokens, config.engine.max_context_len, config.engine.kv_cache_tokens
    prompt = config.data.max_prompt_len or 1
    for path in ("rollout.max_response_len", "eval.max_response_len"):
        if path.startswith("eval") and value_of(config, path) is None:
            continue
        longest = value_of(config, path)
        if minimum > longest:
            yield f"rollout.min_new_tokens = {minimum} is above {path} = {longest}; lower it to {longest} or less"
        for name, room in (("engine.max_context_len", context), ("engine.kv_cache_tokens", kv)):
            if room is not None and prompt + longest > room:
                asked = f"data.max_prompt_len = {prompt}" if config.data.max_prompt_len else "a prompt of 1 token"
                yield (
                    f"{name} = {room} does not hold {asked} and {path} = {longest}; "
                    f"raise it to {prompt + longest} or more, or shorten the answer"
                )


def _eval_answers_differ(config: Config) -> Iterator[str]:
    num = config.eval.n_samples_per_prompt
    if num > 1 and effective(config, "eval.temperature") == 0:
        yield (
            f"eval.n_samples_per_prompt = {num} draws the same answer {num} times at temperature 0; "
            "set it to 1, or eval.temperature above 0"
        )


def _run_name(config: Config) -> Iterator[str]:
    name = config.run.name
    if name is not None and (name in ("", ".", "..") or "/" in name or "\\" in name):
        yield f'run.name = "{name}" is not a folder name; leave out slashes, and set run.dir for the place'


def _grader_of_groups(config: Config) -> Iterator[str]:
    if config.reward.group and not config.reward.terms and ":" not in config.reward.kind:
        yield (
            f'reward.group = true needs a grader of your own, not reward.kind = "{config.reward.kind}"; '
            "set reward.kind to module:function, or reward.group to false"
        )


def _over_sampling(config: Config) -> Iterator[str]:
    over, batch = config.rollout.over_sampling_batch_size, config.rollout.batch_size
    if over is not None and over < batch:
        yield (
            f"rollout.over_sampling_batch_size = {over} is below rollout.batch_size = {batch}; "
            f"raise it to {batch} or more, or leave it out"
        )


def _filter_has_peers(config: Config) -> Iterator[str]:
    name, alone = config.rollout.dynamic_sampling_filter, config.rollout.n_samples_per_prompt == 1
    if name == "nonzero_std" and alone:
        yield (
            "rollout.dynamic_sampling_filter = nonzero_std drops every group with rollout.n_samples_per_prompt = 1: "
            "one reward is always equal to itself; leave the filter out, or use 2 answers or more"
        )


def _steps_divide(config: Config) -> Iterator[str]:
    prompts, answers = config.rollout.batch_size, config.rollout.n_samples_per_prompt
    steps, samples = config.trainer.num_steps_per_rollout, prompts * answers
    if samples % steps:
        divisors = [n for n in range(1, samples + 1) if samples % n == 0]
        near = sorted(sorted(divisors, key=lambda n: abs(n - steps))[:3])
        yield (
            f"trainer.num_steps_per_rollout = {steps} does not divide the {num_of(samples, 'sample')} of a rollout "
            f"(rollout.batch_size {prompts} x rollout.n_samples_per_prompt {answers}); "
            f"use {', '.join(map(str, near))}, or change the batch"
        )


def _one_policy(config: Config) -> Iterator[str]:
    if config.rollout.temperature == 0:
        yield (
            "rollout.temperature = 0 draws the same answer for a whole group; use a value above 0 "
            "(eval.temperature may be 0)"
        )
    for name, neutral in NEUTRAL_CUTS.items():
        value = getattr(config.rollout, name)
        if value != neutral:
            elsewhere = f" (eval.{name} may differ)" if hasattr(config.eval, name) else ""
            yield (
                f"rollout.{name} = {value} makes the engine sample from another distribution than the trainer scores; "
                f"set it to {neutral} for training{elsewhere}"
            )


def _schedule(config: Config) -> Iterator[str]:
    for section in ("trainer", "critic"):
        lowest, peak, shape = (value_of(config, f"{section}.{name}") for name in ("min_lr", "lr", "lr_schedule"))
        if shape == "constant" and lowest:
            yield (
                f"{section}.min_lr = {lowest} has no effect with {section}.lr_schedule = constant; "
                f"set the schedule to linear or cosine, or leave {section}.min_lr out"
            )
        elif lowest > peak:
            yield f"{section}.min_lr = {lowest} is above {section}.lr = {peak}; lower it to {peak} or less"


def _critic_has_ppo(config: Config) -> Iterator[str]:
    estimator = config.algorithm.advantage_estimator
    if estimator == "ppo":
        return
    for name, field in type(config.critic).model_fields.items():
        value = getattr(config.critic, name)
        if value != field.default:
            yield (
                f"critic.{name} = {value} has no effect with algorithm.advantage_estimator = {estimator}, which has no "
                f"critic; set the estimator to ppo, or leave critic.{name} out"
            )


def _policy_learns(config: Config) -> Iterator[str]:
    num, alone = config.rollout.num_rollout, config.critic.num_critic_only_steps
    has_critic = config.algorithm.advantage_estimator == "ppo" and not config.cluster.debug_rollout_only
    if has_critic and num is not None and alone >= num:
        yield (
            f"critic.num_critic_only_steps = {alone} leaves the policy none of rollout.num_rollout = {num}; "
            f"lower it to {num - 1} or less, or raise rollout.num_rollout"
        )


Check = Callable[["Config"], Iterator[str]]
ALWAYS: tuple[Check, ...] = (
    _length_of_run,
    _answers_fit,
    _eval_answers_differ,
    _run_name,
    _grader_of_groups,
    *WEIGHTS,
    *CLUSTER,
    *PARALLEL,
)
COMMON: tuple[Check, ...] = (_steps_divide, _schedule, check_aggregation)
POLICY: tuple[Check, ...] = (
    _over_sampling,
    _filter_has_peers,
    _one_policy,
    _critic_has_ppo,
    _policy_learns,
    *ALGORITHM,
)
