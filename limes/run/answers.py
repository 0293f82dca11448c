"""Sampled answers as text for people."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from limes.config.counting import num_of
from limes.records import Message, Reward, Sample, Status

MAX_CHARACTERS = 240


def answer_lines(title: str, samples: Sequence[Sample]) -> list[str]:
    """A title and, for each sample, its question, its answer, and what became of it."""
    lines = [f"{title}:"]
    for number, sample in enumerate(samples, start=1):
        lines += [
            f"  {number}. asked     {shown(last_user_text(sample.prompt)) or '(nothing)'}",
            f"     answered  {shown(sample.response) or '(nothing)'}",
            f"     reward    {_reward(sample.reward)}{_remarks(sample)}",
        ]
    return lines


def last_user_text(prompt: str | list[Message]) -> str:
    """The text of the last user message, or of the last message where no user speaks; a plain prompt as it is."""
    if isinstance(prompt, str):
        return prompt
    messages = [message for message in prompt if message.get("role") == "user"] or prompt
    content = messages[-1].get("content") if messages else ""
    if isinstance(content, list):
        content = " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


def shown(text: str, limit: int = MAX_CHARACTERS) -> str:
    """One line that a terminal cannot take for orders: line ends become `\\n`, other control characters their escapes.

    A text over `limit` characters keeps its two ends.
    """
    if len(text) > limit:
        left_out = len(text) - limit
        text = f"{text[: limit * 2 // 3]} [{left_out} characters] {text[len(text) - limit // 3 :]}"
    return "".join(_escaped(character) for character in text.strip())


def _escaped(character: str) -> str:
    if unicodedata.category(character)[0] == "C" or character in "\u2028\u2029":
        return character.encode("unicode_escape").decode("ascii")
    return character


def _reward(reward: Reward) -> str:
    if reward is None:
        return "none"
    if isinstance(reward, dict):
        return ", ".join(f"{shown(str(key))} {_reward(value)}" for key, value in reward.items())
    return f"{reward:.3g}" if isinstance(reward, int | float) else shown(str(reward))


def _remarks(sample: Sample) -> str:
    remarks = [num_of(sample.response_length, "token")]
    if sample.status is not Status.COMPLETED:
        remarks.append(sample.status.value)
    if sample.label is not None:
        remarks.append(f"expected {shown(str(sample.label), 80)}")
    if sample.error:
        remarks.append(f"error: {shown(sample.error, 200)}")
    return f"  ({', '.join(remarks)})"
