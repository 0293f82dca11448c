"""One prompt in, one answer out, streamed: `limes sample`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from limes.cluster.roles import load_model, start_engine
from limes.config import Config, Resolved
from limes.config.counting import num_of
from limes.data import PromptRenderer
from limes.driver import DONE, INTERRUPTED, prepare_process
from limes.engine.protocol import GenerateRequest, GenerateResult, SampleKey
from limes.rollout.build import sampling_params
from limes.run import Console

CUT_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Writes the text of tokens as they come, holding back what the next token may still change.

    A character of several bytes may be cut between tokens, so text is written only up to the last whole character.
    """

    def __init__(self, tokenizer: Any, out: TextIO) -> None:
        self._tokenizer = tokenizer
        self._out = out
        self._token_ids: list[int] = []
        self._num_written = 0

    def add(self, token_id: int) -> None:
        """Take one more token."""
        self._token_ids.append(token_id)
        text = self._text()
        if not text.endswith(CUT_CHARACTER):
            self._write(text)

    def end(self) -> None:
        """Write what is held back."""
        self._write(self._text())

    def _text(self) -> str:
        return self._tokenizer.decode(self._token_ids, skip_special_tokens=True)

    def _write(self, text: str) -> None:
        self._out.write(text[self._num_written :])
        self._out.flush()
        self._num_written = max(self._num_written, len(text))


async def sample(config: Config, prompt: str, out: TextIO, console: Console) -> None:
    """Answer `prompt` on `out` as the tokens come, then tell their number and speed on the console."""
    policy = await asyncio.to_thread(load_model, config.model, console)
    prompt_ids = PromptRenderer(policy.tokenizer, config.data).render(prompt)
    engine = start_engine(config, policy, len(prompt_ids))
    request = GenerateRequest(
        request_id="sample",
        prompt_ids=prompt_ids,
        sampling=sampling_params(config.rollout, policy.end_token_ids),
        key=SampleKey(config.run.seed, 0, 0),
    )
    stream = TextStream(policy.tokenizer, out)
    started = time.perf_counter()
    try:
        result = await engine.generate(request, on_token=lambda token_id, log_prob: stream.add(token_id))
        stream.end()
        out.write("\n")
        out.flush()
        console.notice(describe(prompt_ids, result, time.perf_counter() - started))
    finally:
        await engine.close()


def describe(prompt_ids: Sequence[int], result: GenerateResult, seconds: float) -> str:
    """Numbers of an answer in one line."""
    num = len(result.token_ids)
    mean = sum(result.log_probs) / num
    return (
        f"{num_of(num, 'token')} after a prompt of {len(prompt_ids)}, ended by {result.finish_reason.value}, "
        f"mean log-prob {mean:.3f}, {seconds:.2f} s, {num / seconds:.1f} tokens/s"
    )


def run_sample(resolved: Resolved, *, prompt: str) -> int:
    """Answer a prompt with the settings' sampling values; returns the exit code.

    Raises:
        ValueError: the model cannot be had or the prompt does not fit.
    """
    prepare_process(resolved.config)
    with Console() as console:
        try:
            asyncio.run(sample(resolved.config, prompt, sys.stdout, console))
            code = DONE
        except KeyboardInterrupt:
            console.notice("interrupted")
            code = INTERRUPTED
    return code
