"""The batch algebra: how many prompts, samples, tokens and optimizer steps the settings make."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from limes.config.counting import num_of
from limes.config.derived import effective
from limes.config.root import Config


@dataclass(frozen=True, slots=True)
class BatchAlgebra:
    """Counts that follow from the settings; None is what only the data or the model can tell."""

    prompts: int
    """Prompts (groups) a rollout ends with."""

    prompts_in_flight: int
    answers_per_prompt: int
    samples: int
    """Samples of a rollout."""

    steps_per_rollout: int
    """Optimizer steps of a rollout."""

    samples_per_step: int
    max_answer_tokens: int | None
    """Most answer tokens a rollout can have."""

    max_sample_tokens: int | None
    """Longest prompt plus answer."""

    max_tokens_per_step: int | None
    """Most tokens, prompts included, of an optimizer step."""

    max_micro_batches_per_step: int | None
    num_prompts: int | None
    """Prompts of the data."""

    rollouts_per_epoch: int | None
    """Whole rollouts in one pass over the data; 1 when a rollout takes more prompts than there are."""

    num_rollouts: int | None
    num_optimizer_steps: int | None
    """Those of the policy."""

    def rows(self) -> list[tuple[str, str, str]]:
        """Name, value and remark of every count, in reading order."""
        steps = f"{self.steps_per_rollout} a rollout"
        return [
            ("prompts a rollout", str(self.prompts), f"{self.prompts_in_flight} in flight at first"),
            (
                "samples a rollout",
                str(self.samples),
                f"{num_of(self.prompts, 'prompt')} x {num_of(self.answers_per_prompt, 'answer')}",
            ),
            (
                "samples a step",
                str(self.samples_per_step),
                f"{num_of(self.samples, 'sample')} / {num_of(self.steps_per_rollout, 'step')}",
            ),
            ("answer tokens a rollout", _at_most(self.max_answer_tokens, "the data"), ""),
            ("tokens a sample", _at_most(self.max_sample_tokens, "the model"), "prompt and answer"),
            ("tokens a step", _at_most(self.max_tokens_per_step, "the model"), ""),
            ("micro-batches a step", _at_most(self.max_micro_batches_per_step, "the model"), ""),
            ("rollouts an epoch", _known(self.rollouts_per_epoch, "the data"), _remark(self.num_prompts)),
            ("rollouts", _known(self.num_rollouts, "the data"), "evaluation only" if self.num_rollouts == 0 else ""),
            ("optimizer steps", _known(self.num_optimizer_steps, "the data"), steps),
        ]


def _known(count: int | None, teller: str) -> str:
    return f"known from {teller}" if count is None else str(count)


def _at_most(count: int | None, teller: str) -> str:
    return _known(count, teller) if count is None else f"<= {count}"


def _remark(num_prompts: int | None) -> str:
    return "" if num_prompts is None else f"{num_of(num_prompts, 'prompt')} in the data"


def batch_algebra(config: Config, num_prompts: int | None = None) -> BatchAlgebra:
    """Work out the counts; `num_prompts` is the number of prompts that are left for training, when known.

    Raises:
        ValueError: no prompts, or too few for `rollout.num_epoch` to make a single rollout.
    """
    rollout, steps = config.rollout, config.trainer.num_steps_per_rollout
    samples = rollout.batch_size * rollout.n_samples_per_prompt
    per_epoch = _rollouts_per_epoch(config, num_prompts)
    num_rollouts = rollout.num_rollout
    if num_rollouts is None and per_epoch is not None:
        num_rollouts = (rollout.num_epoch or 0) * per_epoch
    critic_only = config.critic.num_critic_only_steps
    samples_per_step, sample_tokens = samples // steps, _max_sample_tokens(config)
    return BatchAlgebra(
        prompts=rollout.batch_size,
        prompts_in_flight=effective(config, "rollout.over_sampling_batch_size"),
        answers_per_prompt=rollout.n_samples_per_prompt,
        samples=samples,
        steps_per_rollout=steps,
        samples_per_step=samples_per_step,
        max_answer_tokens=None if config.algorithm.is_supervised else samples * rollout.max_response_len,
        max_sample_tokens=sample_tokens,
        max_tokens_per_step=None if sample_tokens is None else samples_per_step * sample_tokens,
        max_micro_batches_per_step=_max_micro_batches(config, samples_per_step, sample_tokens),
        num_prompts=num_prompts,
        rollouts_per_epoch=per_epoch,
        num_rollouts=num_rollouts,
        num_optimizer_steps=None if num_rollouts is None else max(0, num_rollouts - critic_only) * steps,
    )


def _rollouts_per_epoch(config: Config, num_prompts: int | None) -> int | None:
    if num_prompts is None:
        return None
    batch, source = config.rollout.batch_size, config.data.prompt_data
    if num_prompts < 1:
        raise ValueError(
            f'data.prompt_data = "{source}" has no prompts to train on; check the file, its row slice and length limit'
        )
    if num_prompts < batch and config.rollout.num_rollout is None:
        raise ValueError(
            f"rollout.batch_size = {batch} takes more prompts than the {num_prompts} of data.prompt_data = {source}; "
            f"lower it to {num_prompts} or less, or set rollout.num_rollout instead of rollout.num_epoch"
        )
    return max(1, num_prompts // batch)


def _max_sample_tokens(config: Config) -> int | None:
    prompt, context = config.data.max_prompt_len, config.engine.max_context_len
    bounds = [context] if context is not None else []
    if prompt is not None and not config.algorithm.is_supervised:
        bounds.append(prompt + config.rollout.max_response_len)
    return min(bounds, default=None)


def _max_micro_batches(config: Config, samples_per_step: int, sample_tokens: int | None) -> int | None:
    """Each micro-batch holds at least as many samples as fit at full length, and one where none fits."""
    if sample_tokens is None:
        return None
    return ceil(samples_per_step / max(1, config.trainer.max_tokens_per_micro_batch // sample_tokens))
