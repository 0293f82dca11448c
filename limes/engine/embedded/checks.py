"""What a request must be before it may reach the engine's thread, where a bad value would cost every answer."""

from __future__ import annotations

from math import inf
from operator import index

from limes.engine.protocol import GenerateRequest, RequestRefused, SamplingParams


def check_request(request: GenerateRequest, vocab_size: int) -> tuple[int, ...]:
    """Refuse what cannot be sampled; returns the prompt's ids as they are now.

    Raises:
        RequestRefused: names the value.
    """
    prompt_ids = tuple(map(index, request.prompt_ids))
    for what, token_ids in {"prompt_ids": prompt_ids, "stop_token_ids": request.sampling.stop_token_ids}.items():
        unknown = [token for token in token_ids if not 0 <= token < vocab_size]
        if unknown:
            raise RequestRefused(f"{what} hold {unknown[0]}, the model knows ids 0 .. {vocab_size - 1}")
    if prompt_ids and not 0 <= request.first_position < len(prompt_ids):
        raise RequestRefused(
            f"first_position = {request.first_position} of a prompt of {len(prompt_ids)} tokens; it counts the "
            "response tokens that the prompt ends with, and at least one token must come before them"
        )
    _check_sampling(request.sampling)
    return prompt_ids


def _check_sampling(sampling: SamplingParams) -> None:
    rules = {
        "temperature": (0 <= sampling.temperature < inf, "0 or more, and finite"),
        "top_p": (0 < sampling.top_p <= 1, "above 0 and at most 1"),
        "top_k": (sampling.top_k == -1 or sampling.top_k > 0, "-1 or above 0"),
        "min_p": (0 <= sampling.min_p <= 1, "between 0 and 1"),
        "min_new_tokens": (sampling.min_new_tokens >= 0, "0 or more"),
        "stop": (not isinstance(sampling.stop, str) and all(sampling.stop), "a tuple of strings that are not empty"),
    }
    for name, (holds, rule) in rules.items():
        if not holds:
            raise RequestRefused(f"{name} = {getattr(sampling, name)!r} must be {rule}")
