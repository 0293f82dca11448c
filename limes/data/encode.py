"""A prompt set as token ids: what does not fit is left out and counted, never cut."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from limes.config.counting import num_of
from limes.data.prompts import PromptSet
from limes.data.render import PromptRenderer
from limes.records import Message

CHUNK = 256


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt with its token ids; `row_index` is its place in the prompt set."""

    token_ids: list[int]
    prompt: str | list[Message]
    label: Any
    metadata: dict[str, Any]
    row_index: int


@dataclass(frozen=True, slots=True)
class EncodedPrompts:
    """The prompts that fit, in the order of their prompt set.

    `longest` counts the tokens of the longest prompt, kept or not. `fingerprint` changes with the rows and with how
    they are rendered.
    """

    prompts: list[EncodedPrompt]
    num_too_long: int
    longest: int
    fingerprint: str
    name: str

    def __len__(self) -> int:
        return len(self.prompts)


def encode_prompts(
    prompt_set: PromptSet,
    renderer: PromptRenderer,
    max_prompt_len: int,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> EncodedPrompts:
    """Render and tokenise every prompt; those of more than `max_prompt_len` tokens are counted and left out.

    Args:
        prompt_set: the rows.
        renderer: how a prompt becomes token ids.
        max_prompt_len: longest prompt in tokens.
        progress: called with (rows done, rows in all).

    Raises:
        ValueError: a row cannot be rendered, has no tokens, the set is empty, or no prompt fits.
    """
    if not prompt_set.rows:
        raise ValueError(f"{prompt_set.name} holds no prompts")
    prompts, lengths = [], []
    digest = hashlib.sha256(prompt_set.fingerprint.encode())
    for start in range(0, len(prompt_set.rows), CHUNK):
        for index, token_ids in enumerate(_encode_chunk(prompt_set, renderer, start), start):
            lengths.append(len(token_ids))
            if len(token_ids) > max_prompt_len:
                continue
            row = prompt_set.rows[index]
            prompts.append(EncodedPrompt(token_ids, row.prompt, row.label, row.metadata, row_index=index))
            digest.update(array("q", [index, len(token_ids), *token_ids]).tobytes())
        if progress is not None:
            progress(len(lengths), len(prompt_set.rows))
    if not prompts:
        raise ValueError(
            f"none of {num_of(len(lengths), 'prompt')} of {prompt_set.name} fits in {num_of(max_prompt_len, 'token')} "
            f"(shortest {min(lengths)}, longest {max(lengths)}); raise data.max_prompt_len or engine.max_context_len, "
            "or lower rollout.max_response_len"
        )
    return EncodedPrompts(
        prompts=prompts,
        num_too_long=len(lengths) - len(prompts),
        longest=max(lengths),
        fingerprint=digest.hexdigest()[:16],
        name=prompt_set.name,
    )


def _encode_chunk(prompt_set: PromptSet, renderer: PromptRenderer, start: int) -> list[list[int]]:
    texts = []
    for index, row in enumerate(prompt_set.rows[start : start + CHUNK], start):
        try:
            texts.append(renderer.text(row.prompt, row.tools))
        except ValueError as error:
            raise ValueError(f"row {index} of {prompt_set.name}: {error}") from error
    encoded = renderer.tokenise(texts)
    for index, token_ids in enumerate(encoded, start):
        if not token_ids:
            raise ValueError(f"row {index} of {prompt_set.name}: the prompt has no tokens; leave the row out")
    return encoded
