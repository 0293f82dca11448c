"""The conversations of a run of supervised fine-tuning: those to train on, those held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from limes.config import Config, batch_algebra
from limes.config.counting import num_of
from limes.data import (
    Conversation,
    EncodedConversations,
    EncodedPrompt,
    PromptRenderer,
    PromptSet,
    encode_conversations,
    load_prompts,
)
from limes.rollout.evaluation import EvalSet, eval_seed
from limes.run import Console

if TYPE_CHECKING:
    from limes.models.policy import TextModel


@dataclass(frozen=True, slots=True)
class Conversations:
    """What there is to learn.

    Attributes:
        training: the conversations to train on; None where nothing is trained.
        held_out: those of the evaluation.
        questions: their last prompts, for answers that people see.
        longest: tokens of the longest of these prompts.
    """

    training: EncodedConversations | None
    held_out: EncodedConversations
    questions: EvalSet
    longest: int


def load_conversations(config: Config, policy: TextModel, console: Console) -> Conversations:
    """Load and tokenise the conversations to train on and those of the evaluation.

    Raises:
        ValueError: data cannot be had, an answer cannot be told from its prompt, or nothing fits.
    """
    room = min(config.engine.max_context_len or policy.max_context_len, policy.max_context_len)
    trains = config.rollout.num_rollout != 0
    training_rows = load_prompts(config.data) if trains or config.eval.prompt_data is None else None
    training = None
    if trains:
        assert training_rows is not None
        training = _encode(training_rows, policy, config, room, console)
        _tell(console, "training", training, room, config.data.max_prompt_len)
        batch_algebra(config, len(training.prompts))  # refuses what cannot make a single rollout
    rows = load_prompts(config.data, config.eval.prompt_data) if config.eval.prompt_data else training_rows
    assert rows is not None
    first = PromptSet(rows=rows.rows[: config.eval.num_prompts], name=rows.name, fingerprint=rows.fingerprint)
    held_out = _encode(first, policy, config, room, console)
    if config.eval.interval is not None or not trains:
        _tell(console, "evaluation", held_out, room, config.data.max_prompt_len)
    questions = _questions(held_out.conversations, room - config.eval_sampling().max_response_len)
    longest = max((len(question.token_ids) for question in questions), default=1)
    return Conversations(training, held_out, EvalSet(questions, 1, (1,), eval_seed(config.run.seed)), longest)


def _questions(conversations: Sequence[Conversation], room: int) -> list[EncodedPrompt]:
    """The last prompt of each conversation, where it leaves room for an answer; the answer is its label."""
    lasts = [(c, c.turns[-1]) for c in conversations if len(c.turns[-1].prompt_ids) <= room]
    return [
        EncodedPrompt(list(turn.prompt_ids), turn.prompt, turn.answer, c.metadata, c.row_index) for c, turn in lasts
    ]


def _encode(rows: PromptSet, policy: TextModel, config: Config, room: int, console: Console) -> EncodedConversations:
    renderer = PromptRenderer(policy.tokenizer, config.data)
    with console.phase("tokenise", len(rows.rows), detail=rows.name) as phase:
        return encode_conversations(
            rows,
            renderer,
            (*policy.end_token_ids, *config.rollout.stop_token_ids),
            room,
            max_prompt_len=config.data.max_prompt_len,
            progress=phase.update,
        )


def _tell(console: Console, purpose: str, encoded: EncodedConversations, room: int, max_prompt_len: int | None) -> None:
    answers = sum(len(conversation.turns) for conversation in encoded.conversations)
    console.notice(
        f"{purpose} data: {num_of(len(encoded), 'conversation')} with {num_of(answers, 'answer')} to learn, of at most "
        f"{num_of(encoded.longest, 'token')}, from {encoded.name}"
    )
    if encoded.num_too_long:
        limits = f"{room} tokens" + ("" if max_prompt_len is None else f", or their prompts {max_prompt_len}")
        too_long = num_of(encoded.num_too_long, "conversation")
        console.warn(f"{purpose} data: {too_long} left out for going over {limits}; none is cut")
    if encoded.num_untrained:
        untrained = num_of(encoded.num_untrained, "conversation")
        console.warn(f"{purpose} data: {untrained} left out, whose answers all have weight 0")
