"""A small engine, grader and prompt source that answer as they are told, for tests of what stands around them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence

from limes.engine.protocol import EngineHealth, FinishReason, GenerateRequest, GenerateResult, SampleKey, SamplingParams
from limes.records import Group, Sample
from limes.rewards import Grade
from limes.rollout.sampling import Sampler

HANG = "hang"
STOP = 2
Answer = Callable[[GenerateRequest], object]


def keyed_answer(request: GenerateRequest) -> list[int]:
    """Tokens that depend on the prompt and the key alone, ending in a stop token."""
    key = request.key
    rng = random.Random(repr((key.seed, key.rollout_id, key.sample_index, list(request.prompt_ids))))
    room = request.sampling.max_new_tokens
    tokens = [rng.randrange(10, 20) for _ in range(rng.randrange(1, 6))] + [STOP]
    return tokens[:room]


class FakeEngine:
    """Answers a request with `answer(request)`: token ids, an exception to raise, or HANG.

    `pauses(request)` turns of the event loop go by first, so tests can let answers finish in any order.
    """

    def __init__(
        self, answer: Answer = keyed_answer, pauses: Callable[[GenerateRequest], int] = lambda request: 0
    ) -> None:
        self.answer = answer
        self.pauses = pauses
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.calls: list[str] = []
        self.version = 0
        self.error: str | None = None
        self.resident = {"weights", "kv_cache", "cuda_graph"}
        self._hanging: dict[str, asyncio.Event] = {}

    async def generate(self, request: GenerateRequest, on_token: object = None) -> GenerateResult:
        self.requests.append(request)
        for _ in range(self.pauses(request)):
            await asyncio.sleep(0)
        outcome = self.answer(request)
        if outcome == HANG:
            event = self._hanging[request.request_id] = asyncio.Event()
            await event.wait()
            return GenerateResult(request.request_id, finish_reason=FinishReason.ABORT)
        if isinstance(outcome, BaseException):
            raise outcome
        assert isinstance(outcome, list)
        ended = bool(outcome) and outcome[-1] == STOP
        return GenerateResult(
            request_id=request.request_id,
            token_ids=list(outcome),
            log_probs=[-0.5 - i for i in range(len(outcome))],
            weight_versions=[self.version] * len(outcome),
            finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
        )

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        names = list(self._hanging) if request_ids is None else list(request_ids)
        self.aborted += names
        for name in names:
            if name in self._hanging:
                self._hanging[name].set()

    async def offload(self, tags: Iterable[str]) -> None:
        names = set(tags)
        assert names <= self.resident, f"{names - self.resident} offloaded twice"
        self.resident -= names
        self.calls.append(f"offload {sorted(names)}")

    async def onload(self, tags: Iterable[str]) -> None:
        names = set(tags)
        assert not names & self.resident
        self.resident |= names
        self.calls.append(f"onload {sorted(names)}")

    async def pause(self, mode: str) -> None:
        self.calls.append(f"pause {mode}")

    async def resume(self) -> None:
        self.calls.append("resume")

    async def flush_cache(self) -> None:
        self.calls.append("flush_cache")

    async def weight_version(self) -> int:
        return self.version

    async def set_weight_version(self, version: int) -> None:
        assert version > self.version
        self.version = version
        self.calls.append(f"version {version}")

    async def health(self) -> EngineHealth:
        return EngineHealth(
            alive=self.error is None,
            paused=False,
            num_running=len(self._hanging),
            num_waiting=0,
            kv_tokens_used=0,
            kv_tokens_total=1000,
            resident=frozenset(self.resident),
            weight_version=self.version,
            error=self.error,
        )

    async def close(self) -> None:
        self.calls.append("close")
        await self.abort()


class FakeGrader:
    """Gives `grade(sample)`: a reward, a Grade, an exception to raise, or HANG."""

    def __init__(self, grade: Callable[[Sample], object] = lambda sample: sum(sample.response_tokens) % 2) -> None:
        self.score = grade
        self.batches: list[list[int]] = []
        self.closed = 0

    async def grade(self, samples: list[Sample]) -> list[Grade]:
        self.batches.append([sample.index for sample in samples])
        grades = []
        for sample in samples:
            outcome = self.score(sample)
            if outcome == HANG:
                await asyncio.Event().wait()
            if isinstance(outcome, BaseException):
                raise outcome
            grades.append(outcome if isinstance(outcome, Grade) else Grade(outcome))  # type: ignore[arg-type]
        return grades

    async def close(self) -> None:
        self.closed += 1


class FakeSource:
    """Endless groups: prompt g is the token ids [100 + g, 7], its label is g."""

    def __init__(self, group_size: int = 2) -> None:
        self.group_size = group_size
        self.waiting: list[Group] = []
        self.num_drawn = 0

    @property
    def num_put_back(self) -> int:
        return len(self.waiting)

    def next_groups(self, n: int, /) -> list[Group]:
        served, self.waiting = self.waiting[:n], self.waiting[n:]
        return served + [self._fresh() for _ in range(n - len(served))]

    def put_back(self, groups: list[Group], /) -> None:
        self.waiting += groups

    def _fresh(self) -> Group:
        number = self.num_drawn
        self.num_drawn += 1
        return [
            Sample(
                index=number * self.group_size + member,
                group_index=number,
                prompt=f"prompt {number}",
                tokens=[100 + number, 7],
                label=number,
            )
            for member in range(self.group_size)
        ]


def fake_sampler(engine: FakeEngine, grader: FakeGrader | None = None, **options: object) -> Sampler:
    """A sampler whose text of token ids is their list."""
    settings: dict = {"sampling": SamplingParams(max_new_tokens=10, stop_token_ids=(STOP,)), "timeout_s": 60.0}
    return Sampler(engine, grader or FakeGrader(), decode=str, **(settings | options))  # type: ignore[arg-type]


def new_sample(index: int = 0, tokens: Sequence[int] = (5, 6), group_index: int = 0) -> Sample:
    """A sample with a prompt and no answer."""
    return Sample(index=index, group_index=group_index, tokens=list(tokens), label=index)


def keys(num: int, rollout_id: int = 0) -> list[SampleKey]:
    """Keys of the first samples of a rollout."""
    return [SampleKey(42, rollout_id, position) for position in range(num)]
