"""Rules between the settings of advantages and the loss; see `limes.config.checks`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from limes.config.algorithm import AlgorithmConfig, is_function

if TYPE_CHECKING:
    from limes.config.root import Config

KL_IN_REWARD = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")
"""Estimators that have a KL in their reward."""

WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators that are not themselves without whitening."""

GROUP_BASELINES = ("grpo", "rloo", "reinforce_plus_plus_baseline")
"""Estimators that compare the answers of a group."""

READ_BY = {
    "advantage_std": ("grpo", "step_wise"),
    "advantage_eps": ("grpo", "step_wise"),
    "singletons": (*GROUP_BASELINES, "step_wise"),
    "gamma": ("reinforce_plus_plus", "ppo"),
    "lambd": ("ppo",),
    "outcome_coef": ("step_wise",),
}
"""Settings and the estimators that read them."""


def _groups_compare(config: Config) -> Iterator[str]:
    name, alone = config.algorithm.advantage_estimator, config.rollout.n_samples_per_prompt == 1
    if name in GROUP_BASELINES and alone and config.algorithm.singletons != "raw":
        yield (
            f"rollout.n_samples_per_prompt = 1 leaves algorithm.advantage_estimator = {name} nothing to compare: "
            "every advantage would be 0; use 2 or more"
        )


def _estimator_reads(config: Config) -> Iterator[str]:
    name = config.algorithm.advantage_estimator
    for setting, readers in READ_BY.items():
        value, default = getattr(config.algorithm, setting), AlgorithmConfig.model_fields[setting].default
        if value != default and name not in readers and not is_function(name):
            yield (
                f"algorithm.{setting} = {value} has no effect with algorithm.advantage_estimator = {name}; "
                f"leave it out, or use {' or '.join(readers)}"
            )


def _whitening(config: Config) -> Iterator[str]:
    name = config.algorithm.advantage_estimator
    if name in WHITENED and config.algorithm.normalize_advantages is False:
        yield (
            f"algorithm.normalize_advantages = false takes the whitening out of algorithm.advantage_estimator = "
            f"{name}, which is not itself without it; leave it out"
        )


def _kl(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    name, in_reward, in_loss = algorithm.advantage_estimator, algorithm.kl_coef, algorithm.kl_loss_coef
    if in_reward and in_loss:
        yield (
            f"algorithm.kl_coef = {in_reward} and algorithm.kl_loss_coef = {in_loss} put the KL into reward and loss "
            "at once; set one of them to 0"
        )
    if in_reward and name not in KL_IN_REWARD and not is_function(name):
        yield (
            f"algorithm.kl_coef = {in_reward} has no effect with algorithm.advantage_estimator = {name}; use "
            f"algorithm.kl_loss_coef, or one of {', '.join(KL_IN_REWARD)}"
        )
    if in_loss and algorithm.kl_loss_type == "k1" and not algorithm.use_unbiased_kl:
        yield (
            "algorithm.kl_loss_type = k1 as a loss has no gradient on average; use low_var_kl, k3 or k2, or "
            "algorithm.use_unbiased_kl = true"
        )
    if algorithm.use_unbiased_kl and not in_loss:
        yield "algorithm.use_unbiased_kl = true weighs the KL in the loss, but algorithm.kl_loss_coef = 0; raise it"
    if algorithm.kl_loss_type and not (algorithm.needs_reference or config.model.ref_path):
        yield (
            f"algorithm.kl_loss_type = {algorithm.kl_loss_type} has no effect without a KL; set algorithm.kl_loss_coef "
            "or algorithm.kl_coef, or leave it out"
        )
    if algorithm.ref_update_interval and not (algorithm.needs_reference or config.model.ref_path):
        yield (
            f"algorithm.ref_update_interval = {algorithm.ref_update_interval} has no reference to update; set "
            "algorithm.kl_loss_coef or algorithm.kl_coef, or leave it out"
        )


def _clip_range(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    low, high, dual = algorithm.eps_clip, algorithm.eps_clip_high, algorithm.eps_clip_c
    if high is not None and high < low < 1:
        yield f"algorithm.eps_clip_high = {high} is below algorithm.eps_clip = {low}; raise it to {low} or leave it out"
    bound = 1 + (low if high is None else high)
    if dual is not None and dual <= bound:
        yield f"algorithm.eps_clip_c = {dual} is inside the clip range, which ends at {bound:g}; use more, such as 3"


def _old_log_probs(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    engines = [name for name in ("use_rollout_log_probs", "use_decoupled_loss") if getattr(algorithm, name)]
    if len(engines) == 2:
        yield (
            "algorithm.use_rollout_log_probs and algorithm.use_decoupled_loss say two things about the trust region; "
            "set one of them to false"
        )
    for name in engines:
        if algorithm.correction != "none":
            yield (
                f"algorithm.{name} = true already weighs tokens by the engine's log-probs, and algorithm.correction = "
                f"{algorithm.correction} would do so twice; set algorithm.{name} to false or the correction to none"
            )
    if algorithm.use_decoupled_loss and algorithm.policy_loss != "clipped" and not is_function(algorithm.policy_loss):
        yield (
            f"algorithm.use_decoupled_loss = true needs algorithm.policy_loss = clipped, not {algorithm.policy_loss}; "
            f"for {algorithm.policy_loss} use algorithm.correction = tis"
        )
    if algorithm.use_opsm and config.trainer.num_steps_per_rollout == 1 and not engines:
        yield (
            "algorithm.use_opsm = true compares with old log-probs, which with trainer.num_steps_per_rollout = 1 are "
            "the current ones; set algorithm.use_rollout_log_probs to true, or take 2 or more steps"
        )
    delta = algorithm.opsm_delta
    if not algorithm.use_opsm and delta != AlgorithmConfig.model_fields["opsm_delta"].default:
        yield f"algorithm.opsm_delta = {delta} has no effect with algorithm.use_opsm = false; set that to true"


def _correction(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    kind, (low, high) = algorithm.correction, algorithm.correction_window
    if low >= high:
        yield (
            f"algorithm.correction_low = {low:g} is not below algorithm.correction_high = {high:g}: nothing is inside; "
            f"lower it below {high:g}, or raise the upper end"
        )
    if low > 1 or high < 1:
        yield (
            f"algorithm.correction_low = {low:g} and algorithm.correction_high = {high:g} leave out 1, the weight of a "
            "token on which trainer and engine agree; set them around 1"
        )
    readers = {
        "correction_level": ("tis", "mis"),
        "correction_low": ("tis", "mis", "icepop"),
        "correction_high": ("tis", "mis", "icepop"),
        "correction_veto": ("mis",),
        "rejected_tokens": ("mis", "icepop"),
    }
    for setting, kinds in readers.items():
        value = getattr(algorithm, setting)
        if value != AlgorithmConfig.model_fields[setting].default and kind not in kinds:
            yield (
                f"algorithm.{setting} = {value} has no effect with algorithm.correction = {kind}; "
                f"leave it out, or use {' or '.join(kinds)}"
            )


def check_aggregation(config: Config) -> Iterator[str]:
    """A constant that no aggregation reads."""
    constant, how = config.algorithm.aggregation_constant, config.algorithm.aggregation
    if constant is not None and how != "constant":
        yield (
            f"algorithm.aggregation_constant = {constant} has no effect with algorithm.aggregation = {how}; "
            "set algorithm.aggregation to constant, or leave the constant out"
        )


def _overlong(config: Config) -> Iterator[str]:
    buffer, penalty = config.algorithm.overlong_buffer, config.algorithm.overlong_penalty
    longest = config.rollout.max_response_len
    if buffer is not None and buffer > longest:
        yield (
            f"algorithm.overlong_buffer = {buffer} is above rollout.max_response_len = {longest}; "
            f"lower it to {longest} or less"
        )
    if buffer is None and penalty != AlgorithmConfig.model_fields["overlong_penalty"].default:
        yield (
            f"algorithm.overlong_penalty = {penalty} has no effect without algorithm.overlong_buffer; "
            "set that, or leave it out"
        )


def _teacher(config: Config) -> Iterator[str]:
    coef, default = config.teacher.opd_coef, type(config.teacher).model_fields["opd_coef"].default
    if config.teacher.path is None and coef != default:
        yield f"teacher.opd_coef = {coef} has no effect without a teacher; set teacher.path, or leave it out"


ALGORITHM: tuple[Callable[[Config], Iterator[str]], ...] = (
    _groups_compare,
    _estimator_reads,
    _whitening,
    _kl,
    _clip_range,
    _old_log_probs,
    _correction,
    _overlong,
    _teacher,
)
