"""The answers of a conversation, one at a time: what the model sees before each, and what it then has to produce.

Every answer gets the very prompt that generation would render for it. So it does not matter what a template does to
earlier turns (strip their thinking, put the system prompt elsewhere): the model learns each answer after the tokens it
will see when it is asked for one. Conversations whose template leaves earlier turns alone lose nothing by it, as
training computes common beginnings once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from limes.data.prompts import Row
from limes.data.render import PromptRenderer
from limes.records import Message

ASSISTANT = "assistant"
SHOWN_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class TurnText:
    """One answer as text.

    Attributes:
        prompt: what comes before it; text where there is no chat template.
        prompt_text: the same, rendered for generation.
        full_text: prompt and answer, rendered; it starts with `prompt_text`.
        answer: what the data gives as the answer, for people.
        weight: of the answer in the loss, above 0.
        where: `message 3`.
    """

    prompt: str | list[Message]
    prompt_text: str
    full_text: str
    answer: str
    weight: float
    where: str

    @property
    def answer_text(self) -> str:
        """The answer as rendered, with all that the template puts behind it."""
        return self.full_text[len(self.prompt_text) :]


def turns_of(row: Row, renderer: PromptRenderer) -> Iterator[TurnText]:
    """The answers of a row that train.

    Either the row's messages hold the answers: each message of the assistant trains, with its `weight` (1 without one).
    Or the row's label is the one answer to its prompt; messages of the assistant in the prompt then train only where
    they have a weight. An answer of weight 0 is still seen by the later ones. What comes after the last answer is not
    used.

    Raises:
        ValueError: no answer, or two ways of giving it, a weight that is no number of at least 0, or a template that
            does not render an answer, whole, where generation would begin.
    """
    if not renderer.apply_chat_template:
        yield _plain_turn(row, renderer)
        return
    messages, default_weight = _messages(row)
    weights = [_weight(message, f"message {i}", default_weight) for i, message in enumerate(messages)]
    if row.label is not None:
        weights[-1] = 1.0
    messages = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
    trained = [i for i, weight in enumerate(weights) if weight > 0]
    if row.tools and trained:
        _check_tools(row.tools, messages[: trained[0]], renderer)
    for i in trained:
        yield _chat_turn(messages, i, weights[i], row.tools, renderer)


def _messages(row: Row) -> tuple[list[Message], float]:
    """The conversation, and the weight of an answer that does not say its own."""
    prompt, label = row.prompt, row.label
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    ends_with_answer = messages[-1]["role"] == ASSISTANT
    if label is None:
        if not any(message["role"] == ASSISTANT for message in messages):
            raise ValueError(
                "it has no answer to learn: neither a message of the assistant nor a label (data.input_key and "
                "data.label_key name the columns); leave the row out"
            )
        return messages, 1.0
    if ends_with_answer:
        raise ValueError(
            'it has two answers, its last message and its label; data.label_key = "" says that the label is none'
        )
    return [*messages, {"role": ASSISTANT, "content": _label_text(label)}], 0.0


def _label_text(label: Any) -> str:
    if isinstance(label, str) and label:
        return label
    raise ValueError(f"its answer, the label, is {label!r}; an answer to learn is text")


def _weight(message: Message, where: str, default: float) -> float:
    own = message.get("weight")
    if message["role"] != ASSISTANT:
        if own:
            raise ValueError(f"{where} is the {message['role']}'s and has weight {own!r}; only answers train, drop it")
        return 0.0
    weight = default if own is None else own
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise ValueError(f"{where} has weight {weight!r}; a weight is a number of at least 0")
    return float(weight)


def _plain_turn(row: Row, renderer: PromptRenderer) -> TurnText:
    """Text without a template: prompt, answer, and the tokenizer's end token."""
    prompt, end = renderer.text(row.prompt), renderer.tokenizer.eos_token
    if row.label is None:
        raise ValueError("it has no answer to learn: with data.apply_chat_template = false that is the label")
    if end is None:
        raise ValueError("the tokenizer has no end token, so no answer would ever end; use a chat template")
    answer = _label_text(row.label)
    return TurnText(prompt, prompt, prompt + answer + end, answer, 1.0, "the label")


def _chat_turn(
    messages: list[Message], i: int, weight: float, tools: list[dict[str, Any]] | None, renderer: PromptRenderer
) -> TurnText:
    where, before = f"message {i}", messages[:i]
    if not before:
        raise ValueError(f"{where} is an answer to nothing; give it weight 0")
    turn = TurnText(
        prompt=before,
        prompt_text=renderer.text(before, tools),
        full_text=renderer.conversation_text(messages[: i + 1], tools),
        answer="".join(_texts(messages[i])),
        weight=weight,
        where=where,
    )
    if not turn.full_text.startswith(turn.prompt_text):
        raise ValueError(_explain_start(turn))
    _check_answer(messages[i], turn)
    return turn


def _explain_start(turn: TurnText) -> str:
    same = sum(1 for _ in _common(turn.prompt_text, turn.full_text))
    prompt, conversation = (_shown(text[same:]) for text in (turn.prompt_text, turn.full_text))
    return (
        f"the chat template renders {turn.where} differently from what generation starts with: the prompt goes on with "
        f"{prompt}, the conversation with {conversation}; change data.chat_template_kwargs, give another template with "
        "model.chat_template, or give the message weight 0"
    )


def _common(left: str, right: str) -> Iterator[str]:
    for a, b in zip(left, right, strict=False):
        if a != b:
            return
        yield a


def _check_answer(message: Message, turn: TurnText) -> None:
    """All of an answer must be there; templates drop what they do not know, and some drop thinking even here."""
    parts = [part for part in (*_texts(message), *_calls(message)) if part.strip()]
    if not parts:
        raise ValueError(f"{turn.where} is an empty answer; give it weight 0 or leave the row out")
    rendered = _squeezed(turn.answer_text)
    for part in parts:
        if _squeezed(part) not in rendered:
            raise ValueError(
                f"the chat template leaves {_shown(part)} out of {turn.where} or rewrites it; give another template "
                "with model.chat_template, or give the message weight 0"
            )


def _texts(message: Message) -> list[str]:
    """Thinking and text of a message."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    if any(not isinstance(part, dict) or not isinstance(part.get("text"), str) for part in parts):
        raise ValueError(f"an answer is text, not {_shown(repr(content))}")
    return [str(message.get("reasoning_content") or ""), *(part["text"] for part in parts)]


def _calls(message: Message) -> list[str]:
    """Name and arguments of tool calls: what must be found in the rendered text."""
    found = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments")
        found += [str(function.get("name", "")), *([arguments] if isinstance(arguments, str) else arguments or ())]
    return found


def _check_tools(tools: list[dict[str, Any]], prompt: list[Message], renderer: PromptRenderer) -> None:
    if prompt and renderer.text(prompt, tools) == renderer.text(prompt):
        raise ValueError(
            "it has tools, and the chat template does not show them to the model; give another template with "
            'model.chat_template, or set data.tools_key = ""'
        )


def _squeezed(text: str) -> str:
    """Without white space, which templates add and trim."""
    return "".join(text.split())


def _shown(text: str) -> str:
    return repr(text[:SHOWN_CHARACTERS] + ("..." if len(text) > SHOWN_CHARACTERS else ""))


def answer_tokens(
    turn: TurnText, prompt_ids: Sequence[int], full_ids: Sequence[int], renderer: PromptRenderer, end_ids: Sequence[int]
) -> list[int]:
    """The tokens that generation would have to produce after `prompt_ids`: the answer and its end token.

    What the template puts behind the end token, such as a line end, is not among them: generation stops before it, and
    it is part of the next prompt.

    Args:
        prompt_ids: tokens of `turn.prompt_text`.
        full_ids: tokens of `turn.full_text`. Where they do not start with the prompt's, because a token reaches across
            the border, the answer is tokenised by itself: the model never sees the prompt cut in another way.
        end_ids: tokens that end an answer.

    Raises:
        ValueError: the answer has no end token, goes on behind it, or cannot be told from the prompt in tokens.
    """
    num = len(prompt_ids)
    tokens = list(full_ids[num:])
    if list(full_ids[:num]) != list(prompt_ids):
        tokens = renderer.tokenise_piece(turn.answer_text)
        if renderer.exact_text([*prompt_ids, *tokens]) != renderer.exact_text(full_ids):
            raise ValueError(
                f"in tokens the answer of {turn.where} cannot be told from its prompt, which ends with "
                f"{_shown(turn.prompt_text[-SHOWN_CHARACTERS:])}; end the prompt where a word ends, or use another "
                "template"
            )
    end = next((place for place, token in enumerate(tokens) if token in end_ids), None)
    if end is None:
        raise ValueError(
            f"the chat template closes {turn.where} with {_shown(turn.answer_text[-SHOWN_CHARACTERS:])}, in which "
            "there is no token that ends an answer: the model would never learn to stop; add the token to "
            "rollout.stop_token_ids, or give another template with model.chat_template"
        )
    rest = renderer.tokenizer.decode(tokens[end + 1 :], skip_special_tokens=True)
    if rest.strip():
        raise ValueError(
            f"the answer of {turn.where} goes on with {_shown(rest)} behind a token that ends answers; generation "
            "would stop there: take the token's text out of the message"
        )
    return tokens[: end + 1]
