"""Conversations as token ids, for supervised fine-tuning: what does not fit is left out and counted, never cut."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from limes.config.counting import num_of
from limes.data.encode import CHUNK, EncodedPrompt, EncodedPrompts
from limes.data.prompts import PromptSet
from limes.data.render import PromptRenderer
from limes.data.turns import TurnText, answer_tokens, turns_of
from limes.records import Message

MESSAGE_WEIGHT = "message_weight"
"""Entry of `Sample.metadata`: the weight of its answer in the loss."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer to learn.

    Attributes:
        prompt: what comes before it.
        prompt_ids: the tokens that the model sees, as generation would render them.
        answer_ids: the tokens that it has to produce, the end token last.
        answer: the answer as the data has it.
        weight: of its tokens in the loss, above 0.
    """

    prompt: str | list[Message]
    prompt_ids: array[int]
    answer_ids: array[int]
    answer: str
    weight: float

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)


@dataclass(frozen=True, slots=True)
class Conversation(EncodedPrompt):
    """A row with its answers. It has no token ids of its own: they are those of its turns."""

    turns: tuple[Turn, ...] = ()


@dataclass(frozen=True, slots=True)
class EncodedConversations(EncodedPrompts):
    """Conversations that fit whole, in the order of their rows; `longest` counts prompt and answer.

    `num_untrained` counts rows whose answers all have weight 0.
    """

    num_untrained: int = 0

    @property
    def conversations(self) -> list[Conversation]:
        """The same as `prompts`."""
        return [prompt for prompt in self.prompts if isinstance(prompt, Conversation)]


def encode_conversations(
    rows: PromptSet,
    renderer: PromptRenderer,
    end_token_ids: Sequence[int],
    max_len: int,
    *,
    max_prompt_len: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> EncodedConversations:
    """Render and tokenise every answer of every row with its prompt.

    A conversation with a trained answer that does not fit is left out as a whole, and counted.

    Args:
        rows: conversations, or prompts with the answer as label.
        renderer: how messages become token ids.
        end_token_ids: tokens that end an answer.
        max_len: most tokens of a prompt and its answer.
        max_prompt_len: most tokens of a prompt.
        progress: called with (rows done, rows in all).

    Raises:
        ValueError: a row whose answers cannot be told from their prompts for sure, see `limes.data.turns`; no row is
            left.
    """
    found: list[Conversation] = []
    lengths: list[int] = []
    num_untrained = 0
    for start in range(0, len(rows), CHUNK):
        for index, turns in enumerate(_encode_chunk(rows, renderer, end_token_ids, start), start):
            if not turns:
                num_untrained += 1
                continue
            lengths.append(max(map(len, turns)))
            prompt_len = max(len(turn.prompt_ids) for turn in turns)
            if lengths[-1] <= max_len and prompt_len <= (max_prompt_len or max_len):
                row = rows.rows[index]
                found.append(Conversation([], row.prompt, turns[-1].answer, row.metadata, index, tuple(turns)))
        if progress is not None:
            progress(min(start + CHUNK, len(rows)), len(rows))
    if not found:
        raise ValueError(_none_left(rows.name, lengths, max_len, max_prompt_len))
    return EncodedConversations(
        prompts=list(found),
        num_too_long=len(lengths) - len(found),
        longest=max(lengths),
        fingerprint=_fingerprint(rows, found),
        name=rows.name,
        num_untrained=num_untrained,
    )


def _encode_chunk(
    rows: PromptSet, renderer: PromptRenderer, end_token_ids: Sequence[int], start: int
) -> list[list[Turn]]:
    drafts: list[list[TurnText]] = []
    for index, row in enumerate(rows.rows[start : start + CHUNK], start):
        try:
            drafts.append(list(turns_of(row, renderer)))
        except ValueError as error:
            raise ValueError(f"row {index} of {rows.name}: {error}") from error
    texts = [text for turns in drafts for turn in turns for text in (turn.prompt_text, turn.full_text)]
    encoded = iter(renderer.tokenise(texts) if texts else [])
    found: list[list[Turn]] = []
    for index, turns in enumerate(drafts, start):
        try:
            found.append([_turn(turn, next(encoded), next(encoded), renderer, end_token_ids) for turn in turns])
        except ValueError as error:
            raise ValueError(f"row {index} of {rows.name}: {error}") from error
    return found


def _turn(
    text: TurnText, prompt_ids: list[int], full_ids: list[int], renderer: PromptRenderer, end_token_ids: Sequence[int]
) -> Turn:
    if not prompt_ids:
        raise ValueError(f"before {text.where} there is no token; leave the row out")
    answer_ids = answer_tokens(text, prompt_ids, full_ids, renderer, end_token_ids)
    return Turn(text.prompt, array("i", prompt_ids), array("i", answer_ids), text.answer, text.weight)


def _none_left(name: str, lengths: list[int], max_len: int, max_prompt_len: int | None) -> str:
    if not lengths:
        return f"every answer of {name} has weight 0, so there is nothing to learn; give some a weight"
    prompts = f" with a prompt of {num_of(max_prompt_len, 'token')} at most" if max_prompt_len else ""
    return (
        f"none of {num_of(len(lengths), 'conversation')} of {name} fits in {num_of(max_len, 'token')}{prompts} "
        f"(shortest {min(lengths)}, longest {max(lengths)}); raise engine.max_context_len or data.max_prompt_len, or "
        "give shorter conversations"
    )


def _fingerprint(rows: PromptSet, conversations: list[Conversation]) -> str:
    """Changes with the rows and with how they become tokens."""
    digest = hashlib.sha256(rows.fingerprint.encode())
    for conversation in conversations:
        for turn in conversation.turns:
            digest.update(array("q", [conversation.row_index, len(turn.prompt_ids)]).tobytes())
            digest.update(turn.prompt_ids.tobytes() + turn.answer_ids.tobytes() + repr(turn.weight).encode())
    return digest.hexdigest()[:16]
