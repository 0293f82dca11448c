"""When an answer ends."""

from __future__ import annotations

from typing import Any

from limes.engine.embedded.sequence import Answer
from limes.engine.protocol import FinishReason


def finish_reason(answer: Answer, tokenizer: Any) -> FinishReason | None:
    """Why the answer ends with its newest token, or None. A stop wins over the length limit."""
    sampling, tokens = answer.request.sampling, answer.token_ids
    if len(tokens) >= sampling.min_new_tokens and (
        tokens[-1] in answer.end_token_ids or (sampling.stop and _ends_with_stop(tokens, sampling.stop, tokenizer))
    ):
        return FinishReason.STOP
    return FinishReason.LENGTH if len(tokens) >= sampling.max_new_tokens else None


def _ends_with_stop(tokens: list[int], stops: tuple[str, ...], tokenizer: Any) -> bool:
    """A stop string lies in the last tokens; a character takes at most four byte tokens."""
    window = 4 * max(len(stop) for stop in stops) + 4
    text = tokenizer.decode(tokens[-window:], skip_special_tokens=False)
    return any(stop in text for stop in stops)
