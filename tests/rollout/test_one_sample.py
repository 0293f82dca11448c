"""One answer: what it becomes when engine or grader do well, fail, hang or answer something odd."""

import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_fakes import HANG, STOP, FakeEngine, FakeGrader, fake_sampler, keys, new_sample

from limes.engine.protocol import EngineError, FinishReason, GenerateResult, RequestRefused, SamplingParams
from limes.records import Sample, Status
from limes.rewards import Grade
from limes.rollout.sampling import fresh


def run_group(sampler, group: list[Sample]) -> list[Sample]:
    asyncio.run(sampler.complete_group(group, keys(len(group))))
    return group


def test_tokens_and_log_probs_of_the_engine_are_the_samples_own() -> None:
    """P6: what the engine sampled appears once, in order, all of it trained."""
    engine = FakeEngine(answer=lambda request: [11, 12, STOP])
    engine.version = 3
    (sample,) = run_group(fake_sampler(engine), [new_sample()])
    assert sample.tokens == [5, 6, 11, 12, STOP]
    assert sample.loss_mask == [1, 1, 1]
    assert sample.rollout_log_probs == [-0.5, -1.5, -2.5]
    assert sample.weight_versions == [3, 3, 3]
    assert (sample.status, sample.response, sample.reward) == (Status.COMPLETED, "[11, 12, 2]", 1.0)


def test_an_answer_at_the_limit_is_truncated_and_keeps_its_tokens() -> None:
    """U69 and U68: the reason is of the tokens kept, and the last one is not replaced."""
    engine = FakeEngine(answer=lambda request: [11, 12, 13, 14, STOP][: request.sampling.max_new_tokens])
    (sample,) = run_group(fake_sampler(engine, sampling=SamplingParams(max_new_tokens=2)), [new_sample()])
    assert (sample.status, sample.response_tokens, sample.response_length) == (Status.TRUNCATED, [11, 12], 2)


def test_one_failing_answer_costs_itself_alone() -> None:
    """U77."""
    engine = FakeEngine(answer=lambda r: EngineError("out of pages") if r.key.sample_index == 3 else [11, STOP])
    group = run_group(fake_sampler(engine), [new_sample(i) for i in range(8)])
    assert [sample.index for sample in group if sample.status is Status.FAILED] == [3]
    assert group[3].error == "EngineError: out of pages"
    assert all(sample.reward == 1.0 for sample in group if sample.index != 3)


def test_a_refused_request_keeps_the_engines_numbers() -> None:
    refusal = RequestRefused("prompt 900 + answer 200 exceed 1024")
    (sample,) = run_group(fake_sampler(FakeEngine(answer=lambda request: refusal)), [new_sample()])
    assert (sample.status, sample.error) == (Status.FAILED, f"RequestRefused: {refusal}")


def test_a_lost_answer_ends_at_the_deadline_with_its_id_and_is_aborted() -> None:
    """U78 and U80: the wait ends, the cause and the sample's id are kept, the rest is used."""
    engine = FakeEngine(answer=lambda request: HANG if request.key.sample_index == 1 else [11, STOP])
    group = run_group(fake_sampler(engine, timeout_s=0.05), [new_sample(i) for i in range(3)])
    assert group[1].status is Status.FAILED
    assert group[1].error == "TimedOut: sample 1 had no answer within 0.05 s"
    assert engine.aborted == ["rollout-0-1"]
    assert [group[0].reward, group[2].reward] == [1.0, 1.0]


def test_an_engines_own_timeout_is_not_taken_for_ours() -> None:
    engine = FakeEngine(answer=lambda request: TimeoutError("socket"))
    (sample,) = run_group(fake_sampler(engine), [new_sample()])
    assert sample.error == "TimeoutError: socket"


def test_a_slow_answer_lives_until_the_configured_limit() -> None:
    """U79: there is no shorter limit of our own."""
    engine = FakeEngine(answer=lambda request: [11, STOP], pauses=lambda request: 5000)
    (sample,) = run_group(fake_sampler(engine), [new_sample()])
    assert sample.status is Status.COMPLETED


def test_a_grader_that_hangs_costs_the_sample_at_the_deadline() -> None:
    grader = FakeGrader(lambda sample: HANG if sample.index == 0 else 1.0)
    group = run_group(fake_sampler(FakeEngine(), grader, timeout_s=0.05), [new_sample(0), new_sample(1)])
    assert (group[0].status, group[0].reward) == (Status.FAILED, None)
    assert group[0].error == "TimedOut: sample 0 had no reward within 0.05 s"
    assert group[1].reward == 1.0


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (Grade(None, "SyntaxError: bad regex"), "SyntaxError: bad regex"),
        (RuntimeError("server gone"), "RuntimeError: server gone"),
        (float("nan"), "BadReward: a reward must be a finite number, not nan"),
    ],
)
def test_a_grader_error_leaves_the_answer_unscored_and_not_failed(outcome: object, error: str) -> None:
    (sample,) = run_group(fake_sampler(FakeEngine(), FakeGrader(lambda sample: outcome)), [new_sample()])
    assert (sample.status, sample.reward, sample.error) == (Status.COMPLETED, None, error)


def test_failed_answers_are_not_graded() -> None:
    grader = FakeGrader()
    engine = FakeEngine(answer=lambda request: EngineError("x") if request.key.sample_index == 0 else [11, STOP])
    run_group(fake_sampler(engine, grader), [new_sample(0), new_sample(1)])
    assert grader.batches == [[1]]


def test_a_group_grader_gets_all_answers_of_the_group_in_one_call() -> None:
    grader = FakeGrader()
    engine = FakeEngine(answer=lambda request: EngineError("x") if request.key.sample_index == 1 else [11, STOP])
    seen: list[int] = []
    sampler = fake_sampler(engine, grader, whole_groups=True, on_sample=lambda sample: seen.append(sample.index))
    run_group(sampler, [new_sample(i) for i in range(4)])
    assert grader.batches == [[0, 2, 3]]
    assert seen == [0, 1, 2, 3]


def test_a_resumed_answer_gets_only_what_is_left_of_its_budget() -> None:
    """U73: of at most 10 tokens 6 are there, so 4 are asked for, and noise goes on at position 6."""
    engine = FakeEngine(answer=lambda request: [11] * request.sampling.max_new_tokens)
    sample = new_sample()
    sample.append_tokens([9] * 6, log_probs=[-1.0] * 6, weight_versions=[0] * 6)
    run_group(fake_sampler(engine, sampling=SamplingParams(max_new_tokens=10, min_new_tokens=8)), [sample])
    (request,) = engine.requests
    assert (request.sampling.max_new_tokens, request.sampling.min_new_tokens, request.first_position) == (4, 2, 6)
    assert list(request.prompt_ids) == [5, 6] + [9] * 6
    assert (sample.response_length, sample.status) == (10, Status.TRUNCATED)


def test_an_answer_without_budget_left_asks_nothing() -> None:
    engine = FakeEngine()
    sample = new_sample()
    sample.append_tokens([9] * 10, log_probs=[-1.0] * 10, weight_versions=[0] * 10)
    run_group(fake_sampler(engine), [sample])
    assert engine.requests == []
    assert sample.status is Status.TRUNCATED


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_all_lengths_agree_after_any_number_of_resumes(pieces: list[int]) -> None:
    """U74."""
    sample = new_sample()
    for piece in pieces:
        engine = FakeEngine(answer=lambda request, piece=piece: [11] * min(piece, request.sampling.max_new_tokens))
        run_group(fake_sampler(engine), [sample])
    assert len(sample.response_tokens) == len(sample.loss_mask) == len(sample.rollout_log_probs) == min(sum(pieces), 10)


def test_an_answer_to_another_request_is_refused() -> None:
    """U85: answers are paired by id, never by order."""

    class Mixed(FakeEngine):
        async def generate(self, request, on_token=None):
            result = await super().generate(request)
            result.request_id = "rollout-0-99"
            return result

    (sample,) = run_group(fake_sampler(Mixed()), [new_sample()])
    assert sample.status is Status.FAILED
    assert "answered 'rollout-0-99' to request 'rollout-0-0'" in (sample.error or "")


def test_an_answer_of_no_tokens_is_a_failure_with_a_cause() -> None:
    (sample,) = run_group(fake_sampler(FakeEngine(answer=lambda request: [])), [new_sample()])
    assert sample.status is Status.FAILED
    assert sample.error == "ValueError: the engine ended with 'length' and no token"


def test_uneven_lists_from_the_engine_are_a_failure() -> None:
    class Short(FakeEngine):
        async def generate(self, request, on_token=None):
            return GenerateResult(request.request_id, [11, 12], [-1.0], [0, 0], FinishReason.STOP)

    (sample,) = run_group(fake_sampler(Short()), [new_sample()])
    assert (sample.status, sample.response_length) == (Status.FAILED, 0)


def test_a_fresh_copy_has_the_prompt_and_shares_nothing() -> None:
    sample = new_sample()
    sample.metadata["nested"] = {"a": 1}
    run_group(fake_sampler(FakeEngine()), [sample])
    copy = fresh(sample)
    assert (copy.tokens, copy.response_length, copy.status, copy.reward) == ([5, 6], 0, Status.PENDING, None)
    copy.metadata["nested"]["a"] = 2
    assert sample.metadata["nested"] == {"a": 1}


def meddling(field: str, value: object) -> FakeGrader:
    def grade(sample: Sample) -> float:
        if sample.index == 0:
            setattr(sample, field, value)
        return 1.0

    return FakeGrader(grade)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", [5]),
        ("loss_mask", [0, 1]),
        ("rollout_log_probs", [0.0, 0.0]),
        ("status", Status.TRUNCATED),
        ("metadata", None),
    ],
)
def test_a_grader_that_changes_what_is_trained_costs_the_sample_with_its_cause(field: str, value: object) -> None:
    engine = FakeEngine(answer=lambda request: [11, STOP])
    group = run_group(fake_sampler(engine, meddling(field, value)), [new_sample(0), new_sample(1)])
    assert group[0].reward is None
    assert (group[0].error or "").startswith(f"ChangedSample: the grader changed {field}")
    assert (group[0].tokens, group[0].loss_mask, group[0].status) == ([5, 6, 11, STOP], [1, 1], Status.COMPLETED)
    assert (group[1].reward, group[1].error) == (1.0, None)


def test_what_a_grader_changes_in_place_does_not_reach_the_sample() -> None:
    grader = FakeGrader(lambda sample: float(sample.tokens.pop()))
    (sample,) = run_group(fake_sampler(FakeEngine(answer=lambda request: [11, STOP]), grader), [new_sample()])
    assert sample.tokens == [5, 6, 11, STOP]
    assert (sample.error or "").startswith("ChangedSample: the grader changed tokens of sample 0")


def test_what_a_grader_writes_into_the_metadata_reaches_the_run() -> None:
    grader = FakeGrader(lambda sample: sample.metadata.update(seen=sample.response) or 1.0)
    (sample,) = run_group(fake_sampler(FakeEngine(answer=lambda request: [11, STOP]), grader), [new_sample()])
    assert sample.metadata["seen"] == "[11, 2]"
    assert sample.reward == 1.0


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"step_token_spans": [[0, 1], [1, 9]]}, r"span \[1, 9\] does not fit the 2 tokens"),
        ({"step_token_spans": [[0, 2], [1, 2]]}, "overlap"),
        ({"step_token_spans": [[0, 1], [1]]}, "a step's span is its first token and one past its last"),
        ({"step_token_spans": [[0, 1], [1, 1.5]]}, "a bound of a step's span must be a whole number, not 1.5"),
        ({"step_scores": [1.0, "good"]}, "a step score must be a finite number or None, not 'good'"),
        ({"step_scores": [1.0, float("inf")]}, "not inf"),
        ({"step_scores": 1.0}, "step_scores is a float, not a list"),
        ({"step_indices": [0]}, "2 step_scores, 1 step_indices"),
        ({"step_indices": [0, "b"]}, "a step index must be a whole number"),
    ],
)
def test_malformed_steps_cost_the_sample_with_their_cause(entry: dict, words: str) -> None:
    steps = {"step_scores": [1.0, None], "step_token_spans": [[0, 1], [1, 2]]}

    def grade(sample: Sample) -> float:
        sample.metadata["step_wise"] = steps | entry if sample.index == 0 else steps
        return 1.0

    engine = FakeEngine(answer=lambda request: [11, STOP])
    group = run_group(fake_sampler(engine, FakeGrader(grade)), [new_sample(0), new_sample(1)])
    assert group[0].reward is None
    assert re.match(rf"BadSteps: sample 0: .*{words}", group[0].error or "")
    assert (group[1].reward, group[1].error) == (1.0, None)
