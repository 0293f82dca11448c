"""The embedded engine: samples answers with the training module itself, on the same tensors, on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor

from limes.engine.embedded.checks import check_request
from limes.engine.embedded.forward import forward_step
from limes.engine.embedded.kv_cache import KVCache
from limes.engine.embedded.sampler import Draw, sample_tokens
from limes.engine.embedded.scheduler import Scheduler
from limes.engine.embedded.sequence import Answer, Prompt
from limes.engine.embedded.stopping import finish_reason
from limes.engine.protocol import (
    EngineError,
    EngineHealth,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    OnToken,
    PauseMode,
)
from limes.models.cpu_linear import head_logits
from limes.models.policy import Policy

T = TypeVar("T")
TAGS = frozenset({"weights", "kv_cache", "cuda_graph"})


@dataclass
class EngineCounters:
    """Tokens since the start: computed in pieces, found in shared pages, and sampled."""

    num_prefill_tokens: int = 0
    num_shared_tokens: int = 0
    num_sampled_tokens: int = 0
    num_steps: int = 0


class EmbeddedEngine:
    """See `limes.engine.protocol.Engine`.

    All state belongs to the engine's thread; calls from outside are queued as commands and run between two steps. The
    weights are the policy's own tensors: whoever changes them does it while the engine is idle or paused, then calls
    `set_weight_version`.

    Args:
        policy: the model that is trained.
        kv_cache_tokens: room of the KV cache, rounded up to whole pages.
        page_size, max_running, prefill_chunk: see `EngineConfig`.
        max_context_len: longest prompt plus answer, at most the model's.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        kv_cache_tokens: int,
        page_size: int = 16,
        max_running: int = 128,
        prefill_chunk: int = 512,
        max_context_len: int | None = None,
    ) -> None:
        self.policy = policy
        num_pages = -(-kv_cache_tokens // page_size)
        self._num_slots = num_pages * page_size
        self._scheduler = Scheduler(
            num_pages=num_pages,
            page_size=page_size,
            max_running=max_running,
            prefill_chunk=prefill_chunk,
            max_context_len=min(max_context_len or policy.max_context_len, policy.max_context_len),
        )
        self._cache: KVCache | None = KVCache(policy, self._num_slots)
        self._resident = set(TAGS)
        self._answers: dict[str, Answer] = {}
        self._version = 0
        self._paused = False
        self._closing = False
        self._error: BaseException | None = None
        self._commands: deque[tuple[Callable[[], None], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self.counters = EngineCounters()
        self._thread = threading.Thread(target=self._run, name="limes-engine", daemon=True)
        self._thread.start()

    async def generate(self, request: GenerateRequest, on_token: OnToken | None = None) -> GenerateResult:
        """See `Engine.generate`. Cancelling the call aborts the answer."""
        prompt_ids = check_request(request, self.policy.vocab_size)
        self._scheduler.check_fits(len(prompt_ids), request.sampling.max_new_tokens)
        future: Future[GenerateResult] = Future()
        self._post(lambda: self._start(request, prompt_ids, on_token, future), future)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            with contextlib.suppress(EngineError):  # an engine that is gone works on nothing
                await self._call(lambda: self._drop(future))
            raise

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """See `Engine.abort`; unknown or finished ids are ignored."""
        names = None if request_ids is None else list(request_ids)
        await self._call(lambda: self._abort(names))

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`."""
        await self._call(lambda: self._pause(mode))

    async def resume(self) -> None:
        """See `Engine.resume`."""
        await self._call(lambda: setattr(self, "_paused", False))

    async def run(self, work: Callable[[], T]) -> T:
        """Run other tensor work of this process on the engine's thread, between two steps."""
        return await self._call(work)

    async def flush_cache(self) -> None:
        """See `Engine.flush_cache`."""
        await self._call(self._scheduler.forget_prompts)

    async def offload(self, tags: Iterable[str]) -> None:
        """See `Engine.offload`. The weights are the trainer's: offloading them frees nothing here.

        Raises:
            ValueError: unknown tag, a tag that is not resident, or answers in flight.
        """
        names = self._known(tags)
        await self._call(lambda: self._offload(names))

    async def onload(self, tags: Iterable[str]) -> None:
        """See `Engine.onload`.

        Raises:
            ValueError: unknown tag, a tag that is resident already, or graphs before what they were captured on.
        """
        names = self._known(tags)
        await self._call(lambda: self._onload(names))

    async def weight_version(self) -> int:
        """See `Engine.weight_version`."""
        return self._version

    async def set_weight_version(self, version: int) -> None:
        """The shared weights have changed: tokens carry `version` from now on and cached prefixes are forgotten.

        Raises:
            ValueError: the version falls.
        """
        await self._call(lambda: self._set_version(version))

    async def health(self) -> EngineHealth:
        """See `Engine.health`."""
        pool = self._scheduler.pool
        size = self._scheduler.page_size
        return EngineHealth(
            alive=self._thread.is_alive() and self._error is None,
            paused=self._paused,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            kv_tokens_used=(pool.num_pages - pool.num_available) * size,
            kv_tokens_total=pool.num_pages * size,
            resident=frozenset(self._resident),
            weight_version=self._version,
            error=None if self._error is None else repr(self._error),
        )

    async def close(self) -> None:
        """See `Engine.close`."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    # The rest runs on the engine's thread, except _call and _post.

    async def _call(self, command: Callable[[], T]) -> T:
        future: Future[T] = Future()
        self._post(lambda: future.set_result(command()), future)
        return await asyncio.wrap_future(future)

    def _post(self, command: Callable[[], None], future: Future[Any]) -> None:
        """Queue a command; what it raises goes to `future`."""
        with self._wake:
            if self._error is not None or self._closing:
                future.set_exception(self._gone())
                return
            self._commands.append((command, future))
            self._wake.notify()

    def _gone(self) -> EngineError:
        if self._error is None:
            return EngineError("the embedded engine is closed")
        gone = EngineError(f"the embedded engine died: {self._error!r}")
        gone.__cause__ = self._error
        return gone

    def _run(self) -> None:
        try:
            while self._run_commands():
                if not self._paused and self._scheduler.has_work:
                    self._step()
        except BaseException as error:  # noqa: BLE001 - every waiting call gets it
            self._error = error
        with self._wake:
            self._closing = True  # from here on no command is queued
        while self._commands:
            self._run_command()
        for answer in list(self._answers.values()):
            self._settle(answer, FinishReason.ABORT if self._error is None else self._gone())
        self._cache = None

    def _run_commands(self) -> bool:
        """Run queued commands, waiting for one if there is nothing else to do; False when the engine closes."""
        with self._wake:
            while not (self._commands or self._closing or (self._scheduler.has_work and not self._paused)):
                self._wake.wait()
        for _ in range(len(self._commands)):
            self._run_command()
        return not self._closing

    def _run_command(self) -> None:
        command, future = self._commands.popleft()
        if not future.set_running_or_notify_cancel():
            return
        try:
            if self._error is not None:
                raise self._gone()
            command()
        except Exception as error:  # noqa: BLE001 - handed to the caller
            future.set_exception(error)

    def _start(
        self,
        request: GenerateRequest,
        prompt_ids: tuple[int, ...],
        on_token: OnToken | None,
        future: Future[GenerateResult],
    ) -> None:
        if request.request_id in self._answers:
            raise ValueError(f"request id {request.request_id!r} is already running")
        if self._resident != TAGS:
            missing = sorted(TAGS - self._resident)
            raise EngineError(f"cannot generate while {missing} are offloaded; call onload first")
        ends = frozenset((*self.policy.end_token_ids, *request.sampling.stop_token_ids))
        answer = Answer(request, self._scheduler.prompt_for(prompt_ids), future, on_token, ends)
        self._answers[request.request_id] = answer
        self._scheduler.add(answer)

    def _abort(self, names: list[str] | None) -> None:
        for name in list(self._answers) if names is None else names:
            if name in self._answers:
                self._finish(self._answers[name], FinishReason.ABORT)

    def _drop(self, future: Future[GenerateResult]) -> None:
        """End the answer of a cancelled call, if it has not ended."""
        for answer in list(self._answers.values()):
            if answer.future is future:
                self._finish(answer, FinishReason.ABORT)

    def _pause(self, mode: PauseMode) -> None:
        if mode not in get_args(PauseMode):
            raise ValueError(f"unknown pause mode {mode!r}; known are {get_args(PauseMode)}")
        self._paused = True
        if mode == "abort":
            self._abort(None)
        elif mode == "retract":
            for answer in reversed(self._scheduler.running[:]):
                self._scheduler.retract(answer)

    def _known(self, tags: Iterable[str]) -> set[str]:
        names = set(tags)
        if names - TAGS:
            raise ValueError(f"unknown memory tags {sorted(names - TAGS)}; known are {sorted(TAGS)}")
        return names

    def _offload(self, names: set[str]) -> None:
        if self._answers:
            raise ValueError(f"cannot offload {sorted(names)} while {len(self._answers)} answers are in flight")
        if names - self._resident:
            raise ValueError(f"{sorted(names - self._resident)} are offloaded already")
        self._scheduler.forget_prompts()
        if "kv_cache" in names:
            self._cache = None
        self._resident -= names

    def _onload(self, names: set[str]) -> None:
        if names & self._resident:
            raise ValueError(f"{sorted(names & self._resident)} are resident already")
        missing = TAGS - self._resident - names
        if "cuda_graph" in names and missing:
            raise ValueError(f"cannot onload ['cuda_graph'] while {sorted(missing)} are offloaded; onload those first")
        if "kv_cache" in names:
            self._cache = KVCache(self.policy, self._num_slots)
        self._resident |= names

    def _set_version(self, version: int) -> None:
        if version < self._version:
            raise ValueError(f"weight version {version} is older than the engine's {self._version}")
        self._version = version
        self._scheduler.forget_prompts()

    @torch.inference_mode()
    def _step(self) -> None:
        scheduler, cache = self._scheduler, self._cache
        assert cache is not None
        step = scheduler.next_step()
        drawing: list[Answer] = []
        hidden: list[Tensor] = []
        if step.decodes or step.pieces:
            decoded, ends = forward_step(self.policy, cache, step)
            scheduler.computed(step)
            drawing, hidden = list(step.decodes), [decoded]
            for piece, end in zip(step.pieces, ends, strict=True):
                if piece.completes and isinstance(piece.owner, Prompt):
                    scheduler.prompt_is_ready(piece.owner, end.clone())
                elif piece.completes:
                    drawing.append(piece.owner)  # type: ignore[arg-type]
                    hidden.append(end[None])
        for answer in scheduler.first_draws():
            assert answer.prompt.last_hidden is not None
            drawing.append(answer)
            hidden.append(answer.prompt.last_hidden[None])
        self.counters.num_steps += 1
        self.counters.num_prefill_tokens += sum(piece.num for piece in step.pieces)
        self.counters.num_shared_tokens = scheduler.num_prompt_tokens_shared
        if drawing:
            self._draw(drawing, torch.cat(hidden))

    def _draw(self, answers: list[Answer], hidden_RE: Tensor) -> None:
        logits_RV = head_logits(hidden_RE, self.policy.head_weight).float()
        draws = [Draw(a.request.sampling, a.request.key, a.position, _banned(a)) for a in answers]
        tokens, log_probs = sample_tokens(logits_RV, draws)
        self.counters.num_sampled_tokens += len(tokens)
        for answer, token, log_prob in zip(answers, tokens, log_probs, strict=True):
            try:
                reason = self._append(answer, token, log_prob)
            except Exception as error:  # noqa: BLE001 - costs this answer alone
                self._finish(answer, error)
                continue
            if reason is not None:
                self._finish(answer, reason)

    def _append(self, answer: Answer, token: int, log_prob: float) -> FinishReason | None:
        if not math.isfinite(log_prob):
            raise EngineError(f"no finite logits for token {answer.position} of the answer; are the weights finite?")
        answer.token_ids.append(token)
        answer.log_probs.append(log_prob)
        answer.weight_versions.append(self._version)
        if answer.on_token is not None:
            answer.on_token(token, log_prob)
        return finish_reason(answer, self.policy.tokenizer)

    def _finish(self, answer: Answer, end: FinishReason | Exception) -> None:
        self._scheduler.finish(answer)
        self._settle(answer, end)

    def _settle(self, answer: Answer, end: FinishReason | Exception) -> None:
        """Hand the answer, or why there is none, to whoever waits for it."""
        name = answer.request.request_id
        del self._answers[name]
        if isinstance(end, Exception):
            answer.future.set_exception(end)
            return
        answer.future.set_result(GenerateResult(name, answer.token_ids, answer.log_probs, answer.weight_versions, end))


def _banned(answer: Answer) -> tuple[int, ...]:
    """End tokens, while the answer is shorter than its least length."""
    return tuple(answer.end_token_ids) if len(answer.token_ids) < answer.request.sampling.min_new_tokens else ()
