"""From a prompt to token ids, through the chat template or as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jinja2

from limes.config.data import DataConfig
from limes.records import Message

TEMPLATE_FAULTS = (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError)


class PromptRenderer:
    """Renders prompts for one tokenizer and one set of data settings.

    With a chat template the template alone decides about special tokens: its text is tokenised without adding any, so
    a beginning-of-sequence token stands once where the template writes it. Plain text gets what the tokenizer adds by
    its own rule; a text that already begins with that token does not get a second one. Nothing is ever cut.

    Raises:
        ValueError: chat templates are asked for and the model has none, or a system prompt has no template to go into.
    """

    def __init__(self, tokenizer: Any, data: DataConfig) -> None:
        if data.apply_chat_template and not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "the model has no chat template; set data.apply_chat_template = false to use prompts as plain text, "
                "or model.chat_template = FILE to give a Jinja template"
            )
        if data.system_prompt is not None and not data.apply_chat_template:
            raise ValueError(
                "data.system_prompt is set, but with data.apply_chat_template = false there is nowhere to put it; "
                "unset one of them"
            )
        self.tokenizer = tokenizer
        self.apply_chat_template = data.apply_chat_template
        self.template_kwargs = dict(data.chat_template_kwargs)
        self.system_prompt = data.system_prompt

    def render(self, prompt: str | list[Message]) -> list[int]:
        """Token ids of one prompt, up to where the answer begins.

        Raises:
            ValueError: the template cannot render this prompt, or chat messages meet `apply_chat_template = false`.
        """
        return self.tokenise([self.text(prompt)])[0]

    def text(self, prompt: str | list[Message], tools: list[dict[str, Any]] | None = None) -> str:
        """The prompt as one string, before it is tokenised.

        Args:
            tools: what the answer may call, for the template.

        Raises:
            ValueError: as `render`.
        """
        if not self.apply_chat_template:
            if not isinstance(prompt, str):
                raise ValueError(
                    "chat messages need a chat template, but data.apply_chat_template = false; "
                    "set it to true or give the prompt as text"
                )
            return prompt
        return self._rendered(self._messages(prompt), tools, add_generation_prompt=True)

    def conversation_text(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str:
        """Messages that end with an answer, as one string: what `text` gives for those before it, if the template is
        sound, and then the answer.

        Raises:
            ValueError: the template cannot render them.
        """
        assert self.apply_chat_template
        return self._rendered(self._messages(messages), tools, add_generation_prompt=False)

    def _rendered(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, *, add_generation_prompt: bool
    ) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.template_kwargs,
            )
        except TEMPLATE_FAULTS as error:
            raise ValueError(f"the chat template cannot render it: {type(error).__name__}: {error}") from error
        assert isinstance(text, str), f"the chat template gave {type(text).__name__}"
        return text

    def tokenise(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts made by `text`."""
        encoded = self.tokenizer(
            list(texts),
            add_special_tokens=not self.apply_chat_template,
            truncation=False,
            padding=False,
            return_attention_mask=False,
            verbose=False,
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids if self.apply_chat_template else [self._with_one_bos(prompt) for prompt in ids]

    def tokenise_piece(self, text: str) -> list[int]:
        """Token ids of text that follows other tokens."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        return ids

    def exact_text(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        text: str = self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)
        return text

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        bos = self.tokenizer.bos_token_id
        doubled = bos is not None and ids[:2] == [bos, bos]
        return ids[1:] if doubled else ids

    def _messages(self, prompt: str | list[Message]) -> list[Message]:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.system_prompt is None or messages[0]["role"] in ("system", "developer"):
            return messages
        return [{"role": "system", "content": self.system_prompt}, *messages]
