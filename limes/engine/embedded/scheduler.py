"""Which tokens the next engine step computes, and where their keys go.

Answers wait in arrival order. One starts when there is room for its prompt and its first page; its prompt is computed
once, in pieces, for all answers that share it. When pages run out, the answer that started last gives its own pages up
and waits again; its tokens are kept and only recomputed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from limes.engine.embedded.pages import ROOT, PagePool
from limes.engine.embedded.sequence import Answer, Prompt
from limes.engine.protocol import RequestRefused


@dataclass(frozen=True)
class Piece:
    """Tokens `start .. start + num` of a prompt, or of a waiting answer's own tokens, to be computed now."""

    owner: Prompt | Answer
    start: int
    num: int

    @property
    def completes(self) -> bool:
        """These are the last tokens that the owner lacks."""
        return self.start + self.num == len(self.owner.token_ids)


@dataclass
class Step:
    """What one forward pass computes: one token of each of `decodes`, then `pieces`."""

    decodes: list[Answer] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)


class Scheduler:
    """Owns the queue, the running answers and the pages.

    Args:
        num_pages, page_size: the KV cache.
        max_running: answers decoded together.
        prefill_chunk: tokens of pieces in one step.
        max_context_len: longest prompt and answer.
    """

    def __init__(
        self, *, num_pages: int, page_size: int, max_running: int, prefill_chunk: int, max_context_len: int
    ) -> None:
        self.page_size, self.max_running = page_size, max_running
        self.prefill_chunk, self.max_context_len = prefill_chunk, max_context_len
        self.pool = PagePool(num_pages)
        self.waiting: deque[Answer] = deque()
        self.running: list[Answer] = []
        self.prompts: dict[tuple[int, ...], Prompt] = {}
        self.unfinished: list[Prompt] = []
        self.num_prompts = 0
        self.num_prompt_tokens_shared = 0

    @property
    def has_work(self) -> bool:
        """Something waits, runs or is being computed."""
        return bool(self.waiting or self.running or self.unfinished)

    def check_fits(self, prompt_len: int, max_new_tokens: int) -> None:
        """Refuse what can never run.

        Raises:
            RequestRefused: with the numbers.
        """
        if prompt_len < 1 or max_new_tokens < 1:
            raise RequestRefused(
                f"a request needs a prompt token and a new token, got {prompt_len} and {max_new_tokens}"
            )
        length = prompt_len + max_new_tokens
        if length > self.max_context_len:
            raise RequestRefused(
                f"prompt of {prompt_len} tokens + {max_new_tokens} new tokens = {length} exceeds the context of "
                f"{self.max_context_len}; lower max_response_len or data.max_prompt_len"
            )
        pages = self._pages_for(prompt_len) + self._pages_for(max_new_tokens)
        if pages > self.pool.num_pages:
            raise RequestRefused(
                f"prompt of {prompt_len} tokens + {max_new_tokens} new tokens need {pages} pages of {self.page_size}, "
                f"the KV cache has {self.pool.num_pages}; raise engine.kv_cache_tokens to {pages * self.page_size}"
            )

    def prompt_for(self, token_ids: tuple[int, ...]) -> Prompt:
        """The shared prompt with these tokens; counts one more user."""
        if token_ids not in self.prompts:
            self.num_prompts += 1
            self.prompts[token_ids] = Prompt(token_ids, order=self.num_prompts)
        prompt = self.prompts[token_ids]
        prompt.num_users += 1
        return prompt

    def add(self, answer: Answer) -> None:
        """Queue an answer."""
        self.waiting.append(answer)

    def finish(self, answer: Answer) -> None:
        """Take an answer out, wherever it is."""
        if answer in self.running:
            self._stop(answer)
        else:
            self.waiting.remove(answer)
        self._leave_prompt(answer)

    def retract(self, answer: Answer) -> None:
        """Send a running answer back to the head of the queue, its tokens kept."""
        self._stop(answer)
        self.waiting.appendleft(answer)

    def forget_prompts(self) -> None:
        """After new weights: no later answer may use what the old ones computed. Answers with tokens keep theirs."""
        for answer in reversed(self.running[:]):
            if not answer.token_ids or not answer.prompt.ready:
                self.retract(answer)
        self.pool.forget()
        for prompt in self.unfinished:
            self._drop_pages(prompt)
        self.unfinished, self.prompts = [], {}
        for answer in self.waiting:
            token_ids = answer.prompt.token_ids
            self._leave_prompt(answer)
            answer.prompt = self.prompt_for(token_ids)

    def next_step(self) -> Step:
        """Start what fits, make room for every token, and say what to compute."""
        self._start_waiting()
        step = Step(pieces=self._cut_pieces())
        for answer in list(self.running):
            if answer in self.running and answer.prompt.ready and answer.num_uncomputed == 1 and self._grow(answer):
                step.decodes.append(answer)
        step.decodes = sorted((a for a in step.decodes if a in self.running), key=lambda a: a.prompt.order)
        step.pieces = [p for p in step.pieces if isinstance(p.owner, Prompt) or p.owner in self.running]
        return step

    def computed(self, step: Step) -> None:
        """Record that a step's keys and values are stored."""
        for answer in step.decodes:
            answer.num_computed += 1
        for piece in step.pieces:
            piece.owner.num_computed += piece.num

    def prompt_is_ready(self, prompt: Prompt, last_hidden: Tensor) -> None:
        """Record a prompt's last hidden state."""
        prompt.last_hidden = last_hidden
        self.unfinished.remove(prompt)
        if prompt.num_users == 0:
            self._drop_pages(prompt)

    def first_draws(self) -> list[Answer]:
        """Running answers that have no token yet and whose prompt is ready."""
        return [a for a in self.running if a.prompt.ready and not a.token_ids]

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _start_waiting(self) -> None:
        while self.waiting and len(self.running) < self.max_running:
            answer = self.waiting[0]
            if self._pages_to_start(answer) > self.pool.num_available and not self.running:
                self._evict_idle_prompts(answer.prompt)
            if self._pages_to_start(answer) > self.pool.num_available:
                assert self.running, "an answer that was let in fits when nothing else is there"
                return
            self.waiting.popleft()
            if not answer.prompt.pages:
                self._place_prompt(answer.prompt)
            answer.pages = self.pool.take(self._pages_for(len(answer.token_ids) + 1))
            answer.slots = self._slots(answer.pages)
            self.running.append(answer)

    def _pages_to_start(self, answer: Answer) -> int:
        prompt = 0 if answer.prompt.pages else self._pages_for(len(answer.prompt.token_ids))
        return prompt + self._pages_for(len(answer.token_ids) + 1)

    def _place_prompt(self, prompt: Prompt) -> None:
        """Take pages for a prompt; published pages with the same beginning are shared, all but the last token's.

        Pages are published before they are computed: pieces are cut in the order of placement, so whoever shares a page
        is computed after or together with it.
        """
        size, tokens = self.page_size, prompt.token_ids
        serial = ROOT
        pages: list[int] = []
        num_whole = (len(tokens) - 1) // size
        while len(pages) < num_whole:
            key = (serial, tokens[len(pages) * size : (len(pages) + 1) * size])
            page = self.pool.share(key)
            if page is None:
                break
            serial = self.pool.serial(page)
            pages.append(page)
        prompt.num_computed = len(pages) * size
        self.num_prompt_tokens_shared += prompt.num_computed
        num_shared = len(pages)
        pages += self.pool.take(self._pages_for(len(tokens)) - num_shared)
        for i in range(num_shared, num_whole):
            serial = self.pool.publish(pages[i], (serial, tokens[i * size : (i + 1) * size]))
        prompt.pages, prompt.slots = pages, self._slots(pages)[: len(tokens)]
        self.unfinished.append(prompt)

    def _cut_pieces(self) -> list[Piece]:
        room = self.prefill_chunk
        pieces: list[Piece] = []
        replays = [a for a in self.running if a.num_uncomputed > 1 and a.prompt.ready]
        owners: list[Prompt | Answer] = [*self.unfinished, *replays]
        for owner in owners:
            num = min(room, len(owner.token_ids) - owner.num_computed)
            if num > 0:
                pieces.append(Piece(owner, owner.num_computed, num))
                room -= num
        return pieces

    def _grow(self, answer: Answer) -> bool:
        """Make sure that the answer's newest token has a slot; False if the answer itself had to give way."""
        while len(answer.token_ids) > len(answer.slots):
            if self.pool.num_available == 0:
                victim = self.running[-1]
                self.retract(victim)
                if victim is answer:
                    return False
                continue
            answer.pages += self.pool.take(1)
            answer.slots = self._slots(answer.pages)
        return True

    def _stop(self, answer: Answer) -> None:
        self.running.remove(answer)
        self.pool.release(answer.pages)
        answer.pages, answer.slots, answer.num_computed = [], self._slots([]), 0

    def _leave_prompt(self, answer: Answer) -> None:
        """A prompt without users goes, unless others may rely on pages of it that are still to be computed."""
        prompt = answer.prompt
        prompt.num_users -= 1
        if prompt.num_users == 0:
            if prompt not in self.unfinished:
                self._drop_pages(prompt)
            if self.prompts.get(prompt.token_ids) is prompt:
                del self.prompts[prompt.token_ids]

    def _evict_idle_prompts(self, keep: Prompt) -> None:
        """With nothing running, free all pages but those of `keep`, if it is ready."""
        self.pool.forget()
        for prompt in [*(answer.prompt for answer in self.waiting), *self.unfinished]:
            if prompt is not keep or not prompt.ready:
                self._drop_pages(prompt)
        self.unfinished = []

    def _drop_pages(self, prompt: Prompt) -> None:
        self.pool.release(prompt.pages)
        prompt.pages, prompt.slots, prompt.num_computed, prompt.last_hidden = [], self._slots([]), 0, None

    def _slots(self, pages: list[int]) -> np.ndarray:
        starts = np.asarray(pages, dtype=np.int64)[:, None] * self.page_size
        return (starts + np.arange(self.page_size)).ravel()
