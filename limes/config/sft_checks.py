"""Rules of supervised fine-tuning, `algorithm.loss = sft`; see `limes.config.checks`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from limes.config.root import Config

READ = ("loss", "aggregation", "aggregation_constant")
"""Settings of `algorithm` that supervised fine-tuning reads."""

WITHOUT_EFFECT = {
    "algorithm": "has neither rewards nor ratios",
    "reward": "rewards nothing",
    "critic": "has no critic",
    "teacher": "learns from the data alone",
}
"""Sections that say nothing under supervised fine-tuning, and why."""

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "min_new_tokens")
REFILLING = ("over_sampling_batch_size", "dynamic_sampling_filter", "max_refill_rounds")


def _no_effect(config: Config) -> Iterator[str]:
    for section, why in WITHOUT_EFFECT.items():
        part = getattr(config, section)
        for name in type(part).model_fields:
            value, default = getattr(part, name), getattr(type(part)(), name)
            if value != default and not (section == "algorithm" and name in READ):
                yield f"{section}.{name} = {value} has no effect with algorithm.loss = sft, which {why}; leave it out"
    if config.model.ref_path is not None:
        yield (
            f"model.ref_path = {config.model.ref_path} has no effect with algorithm.loss = sft, which has no "
            "reference; leave it out"
        )


def _one_answer(config: Config) -> Iterator[str]:
    answers = config.rollout.n_samples_per_prompt
    if answers != 1:
        yield (
            f"rollout.n_samples_per_prompt = {answers}, but with algorithm.loss = sft the answers are those of the "
            "data; set it to 1"
        )
    if config.eval.n_samples_per_prompt != 1:
        yield (
            f"eval.n_samples_per_prompt = {config.eval.n_samples_per_prompt}, but with algorithm.loss = sft evaluation "
            "is the loss on the answers of the data; set it to 1"
        )


def _nothing_is_sampled(config: Config) -> Iterator[str]:
    fields = type(config.rollout).model_fields
    for name in (*SAMPLING, *REFILLING):
        value = getattr(config.rollout, name)
        if value != fields[name].default:
            elsewhere = f", or set eval.{name} for the answers that are shown" if hasattr(config.eval, name) else ""
            yield (
                f"rollout.{name} = {value} has no effect with algorithm.loss = sft, which samples nothing to train on; "
                f"leave it out{elsewhere}"
            )


SFT: tuple[Callable[[Config], Iterator[str]], ...] = (_no_effect, _one_answer, _nothing_is_sampled)
