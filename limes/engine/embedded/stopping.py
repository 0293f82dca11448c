"""When an answer ends."""

from __future__ import annotations

from os.path import commonprefix
from typing import Any

from limes.engine.embedded.sequence import Answer
from limes.engine.protocol import FinishReason


def finish_reason(answer: Answer, tokenizer: Any) -> FinishReason | None:
    """Why the answer ends with its newest token, or None. A stop wins over the length limit."""
    sampling, tokens = answer.request.sampling, answer.token_ids
    if len(tokens) >= sampling.min_new_tokens and (
        tokens[-1] in answer.end_token_ids or (sampling.stop and _completes_stop(answer, sampling.stop, tokenizer))
    ):
        return FinishReason.STOP
    return FinishReason.LENGTH if len(tokens) >= sampling.max_new_tokens else None


def _completes_stop(answer: Answer, stops: tuple[str, ...], tokenizer: Any) -> bool:
    """The newest token completes a stop string, which may begin in the response tokens that the prompt ends with.

    A character takes at most four byte tokens, so only the last tokens are looked at.
    """
    window = 4 * max(map(len, stops)) + 4
    given = answer.prompt.token_ids[len(answer.prompt.token_ids) - answer.request.first_position :]
    tokens = [*given[-window:], *answer.token_ids[-window:]][-window:]
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    if not any(stop in text for stop in stops):
        return False
    before = tokenizer.decode(tokens[:-1], skip_special_tokens=False)
    num_old = len(commonprefix([before, text]))  # noqa: RUF071 - texts, not paths
    return any(text.rfind(stop) + len(stop) > num_old for stop in stops if stop in text)
