"""One answer: sampled by the engine, graded, and marked with what went wrong if something did."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from limes.engine.protocol import (
    Engine,
    EngineError,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    SampleKey,
    SamplingParams,
)
from limes.records import Group, Sample, Status
from limes.rewards import Grade, Grader, scalar_reward
from limes.rollout.filters import outcome_reward
from limes.rollout.handed import handed_out, refuse_changes
from limes.rollout.steps import read_steps

ABORT_DEADLINE_S = 30.0
STATUS_OF = {
    FinishReason.STOP: Status.COMPLETED,
    FinishReason.LENGTH: Status.TRUNCATED,
    FinishReason.ABORT: Status.ABORTED,
}


@dataclass
class Sampler:
    """Samples and grades answers.

    Graders get copies: what they write into a sample's metadata reaches the run, and nothing else does.
    Whatever fails costs the sample it happened to: its status becomes FAILED and `error` says `Cause: details`. A
    grader's failure leaves the answer as it is, with no reward and with `error`.

    Attributes:
        decode: turns response ids into the text that graders and people see.
        timeout_s: one answer may take this long, its reward included.
        reward_key: entry of dict rewards that counts.
        whole_groups: the grader takes all answers of a group in one call.
        purpose: first word of request ids, such as `rollout`.
        on_sample: called with each sample that is done, well or not.
        in_flight: ids of the requests that the engine is working on.
        num_submitted: how many answers were asked for so far.
    """

    engine: Engine
    grader: Grader
    decode: Callable[[Sequence[int]], str]
    sampling: SamplingParams
    timeout_s: float
    reward_key: str | None = None
    whole_groups: bool = False
    purpose: str = "rollout"
    on_sample: Callable[[Sample], None] = lambda sample: None
    in_flight: set[str] = field(default_factory=set)
    num_submitted: int = 0

    async def submit_together(self, start: Callable[[], Mapping[asyncio.Task[None], Group]]) -> None:
        """Start tasks that complete groups, while the engine stands still until it has the requests of all.

        So which answers run together does not depend on how long requests take to the engine, and neither does the
        last bit of a log-prob.
        """
        held = await self._hold()
        try:
            before, tasks = self.num_submitted, start()
            num = sum(map(len, tasks.values()))
            while self.num_submitted - before < num and not all(task.done() for task in tasks):
                await asyncio.sleep(0)
        finally:
            if held:
                await self.engine.resume()

    async def complete_group(self, group: Sequence[Sample], keys: Sequence[SampleKey]) -> None:
        """Sample and grade every answer of a group, in place."""
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        if not self.whole_groups:
            await asyncio.gather(*(self._complete(s, key, deadline) for s, key in zip(group, keys, strict=True)))
            return
        await asyncio.gather(*(self._answer(s, key, deadline) for s, key in zip(group, keys, strict=True)))
        await self._grade([sample for sample in group if has_answer(sample)], deadline)
        for sample in group:
            self.on_sample(sample)

    async def stop(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """End the calls of this sampler that run in `tasks`, and what the engine is working on for it."""
        request_ids = set(self.in_flight)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if request_ids:
            await self._abort(request_ids)

    async def _hold(self) -> bool:
        """Let the engine stand still; one that is gone says so with each answer."""
        try:
            await self.engine.pause("in_place")
        except EngineError:
            return False
        return True

    async def _complete(self, sample: Sample, key: SampleKey, deadline: float) -> None:
        await self._answer(sample, key, deadline)
        if has_answer(sample):
            await self._grade([sample], deadline)
        self.on_sample(sample)

    async def _answer(self, sample: Sample, key: SampleKey, deadline: float) -> None:
        """Grow the sample until it ends; one that already has tokens goes on with what is left of its budget."""
        sampling = remaining_budget(self.sampling, sample.response_length)
        self.num_submitted += 1  # seen by nobody before the request is on its way
        if sampling is None:
            sample.status = Status.TRUNCATED
            return
        request = GenerateRequest(
            request_id=f"{self.purpose}-{key.rollout_id}-{key.sample_index}",
            prompt_ids=list(sample.tokens),
            sampling=sampling,
            key=key,
            first_position=sample.response_length,
        )
        self.in_flight.add(request.request_id)
        limit = asyncio.timeout_at(deadline)
        try:
            async with limit:
                result = await self.engine.generate(request)
            self._take(sample, request, result)
        except Exception as error:  # noqa: BLE001 (a failing engine costs the sample, counted with its cause)
            if limit.expired():
                fail(sample, "TimedOut", f"sample {sample.index} had no answer within {self.timeout_s:g} s")
                await self._abort({request.request_id}, sample)
            else:
                fail(sample, type(error).__name__, str(error))
        finally:
            self.in_flight.discard(request.request_id)

    def _take(self, sample: Sample, request: GenerateRequest, result: GenerateResult) -> None:
        if result.request_id != request.request_id:
            raise ValueError(f"the engine answered {result.request_id!r} to request {request.request_id!r}")
        if not result.token_ids and result.finish_reason is not FinishReason.ABORT:
            raise ValueError(f"the engine ended with '{result.finish_reason.value}' and no token")
        sample.append_tokens(result.token_ids, log_probs=result.log_probs, weight_versions=result.weight_versions)
        sample.response = self.decode(sample.response_tokens)
        sample.status = STATUS_OF[result.finish_reason]

    async def _grade(self, samples: list[Sample], deadline: float) -> None:
        """Score answers. A grader that is still at it when the deadline comes costs the samples it has."""
        if not samples:
            return
        limit = asyncio.timeout_at(deadline)
        handed = [handed_out(sample) for sample in samples]
        try:
            async with limit:
                grades = await self.grader.grade(handed)
            for sample, copied, grade in zip(samples, handed, grades, strict=True):
                self._put(sample, copied, grade)
        except Exception as error:  # noqa: BLE001 (a failing grader costs the sample, counted with its cause)
            for sample in samples:
                sample.reward = None
                if limit.expired():
                    fail(sample, "TimedOut", f"sample {sample.index} had no reward within {self.timeout_s:g} s")
                else:
                    sample.error = f"{type(error).__name__}: {error}"

    def _put(self, sample: Sample, handed: Sample, grade: Grade) -> None:
        """Take a grade, and what the grader wrote into the metadata. A reward that is no finite number, steps that do
        not fit the answer, and other tokens than were sampled are the grader's failure, never a 0."""
        cause = "BadReward"
        try:
            scalar_reward(grade.reward, self.reward_key)
            outcome_reward(grade.reward, self.reward_key)
            cause = "ChangedSample"
            if grade.error is None:
                refuse_changes(sample, handed, "the grader")
                sample.metadata = handed.metadata
                cause = "BadSteps"
                read_steps(sample)
        except ValueError as error:
            sample.reward, sample.error = None, f"{cause}: {error}"
        else:
            sample.reward, sample.error = grade.reward, grade.error

    async def _abort(self, request_ids: set[str], sample: Sample | None = None) -> None:
        try:
            async with asyncio.timeout(ABORT_DEADLINE_S):
                await self.engine.abort(request_ids)
        except Exception as error:  # noqa: BLE001 (an engine that cannot even abort is known by its failing answers)
            if sample is not None:
                sample.error = f"{sample.error}; aborting it failed: {error!r}"


def remaining_budget(sampling: SamplingParams, done: int) -> SamplingParams | None:
    """What is left for an answer that already has `done` tokens; None when nothing is."""
    left = sampling.max_new_tokens - done
    if left <= 0:
        return None
    return replace(sampling, max_new_tokens=left, min_new_tokens=max(0, sampling.min_new_tokens - done))


def has_answer(sample: Sample) -> bool:
    """Whether the answer ended by itself or at the length limit, so that it can be graded."""
    return sample.status in (Status.COMPLETED, Status.TRUNCATED)


def fail(sample: Sample, cause: str, details: str) -> None:
    """Mark a sample as failed. The cause is a word that failures are counted by."""
    sample.status = Status.FAILED
    sample.error = f"{cause}: {details}"


def cause_of(error: str) -> str:
    """The word that an error is counted by."""
    return error.partition(":")[0].strip() or "unknown"


def fresh(sample: Sample) -> Sample:
    """A copy of the sample as it was before anything was sampled; each sample is an execution of its own."""
    return Sample(
        index=sample.index,
        group_index=sample.group_index,
        rollout_id=sample.index,
        prompt=sample.prompt,
        tokens=sample.tokens[: sample.prompt_length],
        label=sample.label,
        metadata=copy.deepcopy(sample.metadata),
    )
