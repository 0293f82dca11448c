from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest
from reward_cases import answered

from limes.rewards import Grade
from limes.rewards.function import MAX_THREADS, FunctionGrader, check_call, import_function


def grades(function, samples, **options) -> list[Grade]:
    return asyncio.run(FunctionGrader(function, name="mine", **options).grade(samples))


def length(sample, *, factor=1.0):
    return factor * len(sample.response)


async def length_later(sample, *, factor=1.0):
    await asyncio.sleep(0.01)
    return factor * len(sample.response)


class Lengths:
    async def __call__(self, sample):
        return len(sample.response)


SAMPLES = [answered("a"), answered("abc"), answered("")]


@pytest.mark.parametrize("function", [length, length_later])
def test_one_reward_a_sample_in_order(function):
    assert grades(function, SAMPLES) == [Grade(1.0), Grade(3.0), Grade(0.0)]
    assert grades(function, SAMPLES, options={"factor": 2}) == [Grade(2.0), Grade(6.0), Grade(0.0)]
    assert grades(function, []) == []


def test_objects_with_async_call_and_functions_that_return_awaitables():
    assert grades(Lengths(), SAMPLES) == [Grade(1.0), Grade(3.0), Grade(0.0)]
    assert grades(lambda sample: length_later(sample), SAMPLES) == [Grade(1.0), Grade(3.0), Grade(0.0)]


def test_u77_one_exception_costs_one_sample():
    def picky(sample):
        if sample.response == "abc":
            raise KeyError("no such thing")
        return 1

    async def picky_later(sample):
        return picky(sample)

    for function in (picky, picky_later):
        found = grades(function, SAMPLES)
        assert [grade.reward for grade in found] == [1.0, None, 1.0]
        assert found[1].error == "KeyError: 'no such thing'"
        assert found[0].error is None


def test_exits_and_stop_iterations_are_errors_too():
    def leave(sample):
        raise SystemExit(3)

    def stop(sample):
        raise StopIteration

    async def cancel(sample):
        raise asyncio.CancelledError

    assert [grade.error for grade in grades(leave, SAMPLES[:1])] == ["GraderError: mine raised SystemExit(3)"]
    assert grades(stop, SAMPLES[:1])[0].error.startswith("RuntimeError")
    assert [grade.error for grade in grades(cancel, SAMPLES[:1])] == ["GraderError: mine cancelled itself"]


def test_sync_functions_do_not_block_the_loop_and_run_side_by_side():
    barrier = threading.Barrier(3)

    def meet(sample):
        barrier.wait(20)
        return 1

    async def run():
        task = asyncio.create_task(FunctionGrader(meet, name="meet").grade(SAMPLES[:2]))
        await asyncio.sleep(0.05)
        assert not task.done()
        await asyncio.to_thread(barrier.wait, 20)
        return await task

    assert asyncio.run(run()) == [Grade(1.0), Grade(1.0)]


def test_hanging_sync_function_is_an_error_and_others_are_graded():
    release = threading.Event()

    def hang(sample):
        if sample.response == "abc":
            release.wait(60)
        return 1

    found = grades(hang, SAMPLES, timeout_s=1)
    release.set()
    assert [grade.reward for grade in found] == [1.0, None, 1.0]
    assert found[1].error == "TimedOut: mine did not return within 1 s (reward.timeout_s)"


def test_calls_are_refused_when_too_many_threads_hang():
    release = threading.Event()
    grader = FunctionGrader(lambda sample: release.wait(60), name="mine", timeout_s=0.5)
    first = asyncio.run(grader.grade([answered("")] * MAX_THREADS))
    assert {grade.error.partition(":")[0] for grade in first} == {"TimedOut"}
    (refused,) = asyncio.run(grader.grade([answered("")]))
    assert refused.error == f"GraderError: {MAX_THREADS} earlier calls of mine still hang"
    release.set()
    for thread in threading.enumerate():
        if thread.name == "limes-mine":
            thread.join()
    (again,) = asyncio.run(grader.grade([answered("")]))
    assert again == Grade(1.0)


def test_hanging_async_function_is_an_error_even_if_it_ignores_cancellation():
    release = asyncio.Event()

    async def stubborn(sample):
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        raise KeyError("too late to matter")

    async def run():
        grader = FunctionGrader(stubborn, name="mine", timeout_s=0.1)
        found = await grader.grade(SAMPLES[:1])
        release.set()
        await asyncio.sleep(0.01)
        return found

    assert [grade.error for grade in asyncio.run(run())] == [
        "TimedOut: mine did not return within 0.1 s (reward.timeout_s)"
    ]


def test_cancelled_grading_cancels_the_function():
    ended = []

    async def slow(sample):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(sample.response)

    async def run():
        task = asyncio.create_task(FunctionGrader(slow, name="slow").grade(SAMPLES))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.01)

    asyncio.run(run())
    assert sorted(ended) == ["", "a", "abc"]


def test_one_grader_serves_several_event_loops():
    grader = FunctionGrader(length, name="length")
    many = [answered("ab")] * (MAX_THREADS * 2)
    for _ in range(2):
        assert asyncio.run(grader.grade(many)) == [Grade(2.0)] * len(many)


GROUPED = [answered("a", group=5), answered("bb", group=2), answered("ccc", group=5), answered("", group=2)]


def ranks(samples):
    order = sorted(len(sample.response) for sample in samples)
    return [order.index(len(sample.response)) for sample in samples]


async def ranks_later(samples):
    return ranks(samples)


@pytest.mark.parametrize("function", [ranks, ranks_later])
def test_groups_are_told_apart_by_id(function):
    assert grades(function, GROUPED, group=True) == [Grade(0.0), Grade(1.0), Grade(1.0), Grade(0.0)]


def test_group_rewards_may_be_arrays_and_none():
    import numpy as np

    assert grades(lambda samples: np.arange(len(samples)), GROUPED[:2], group=True) == [Grade(0.0), Grade(0.0)]
    assert grades(lambda samples: [None] * len(samples), GROUPED[:1], group=True) == [Grade(None)]


@pytest.mark.parametrize(
    ("returned", "cause"),
    [
        ([1.0], "2 samples of a group got 1 rewards"),
        ("ab", "must be a list, not str"),
        (1.0, "not float"),
        (None, "None"),
    ],
)
def test_wrong_group_rewards_cost_the_group_only(returned, cause):
    found = grades(lambda samples: returned if samples[0].group_index == 5 else [1, 1], GROUPED, group=True)
    assert [grade.reward for grade in found] == [None, 1.0, None, 1.0]
    assert cause in found[0].error
    assert cause in found[2].error


def test_one_bad_reward_in_a_group_costs_one_sample():
    found = grades(lambda samples: [1.0, float("nan")], GROUPED[:1] + GROUPED[2:3], group=True)
    assert [grade.reward for grade in found] == [1.0, None]


def test_import_of_a_function(tmp_path, monkeypatch):
    (tmp_path / "reward_module_of_mine.py").write_text("class Box:\n    @staticmethod\n    def score(s): return 1\n")
    (tmp_path / "reward_module_broken.py").write_text("import os\n1 / 0\n")
    (tmp_path / "reward_module_needy.py").write_text("import package_nobody_has\n")
    (tmp_path / "reward_module_value.py").write_text("score = 1\ndef scores(s): return 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert import_function("reward_module_of_mine:Box.score")(None) == 1
    for path, message in {
        "reward_module_absent:score": r'reward\.kind = "reward_module_absent:score".*no module.*PYTHONPATH',
        "reward_module_broken:score": "importing it fails with ZeroDivisionError",
        "reward_module_needy:score": "importing it fails with ModuleNotFoundError.*package_nobody_has",
        "reward_module_value:scoers": r"has no 'scoers'; did you mean scores\?",
        "reward_module_value:score": "is a int, not a function",
        "reward_module_value:": "not of the form module:function",
        ":score": "not of the form module:function",
    }.items():
        with pytest.raises(ValueError, match=message):
            import_function(path)


def test_options_must_fit_the_function():
    check_call(length, {"factor": 2}, "reward.kind", "reward.options")
    check_call(lambda sample, **anything: 1, {"factor": 2}, "reward.kind", "reward.options")
    with pytest.raises(ValueError, match=r"reward\.options\.facto is no argument.*did you mean factor\?"):
        check_call(length, {"facto": 2}, "reward.kind", "reward.options")
    with pytest.raises(ValueError, match="is called with a sample"):
        check_call(lambda response, label: 1, {}, "reward.kind", "reward.options")
    with pytest.raises(ValueError, match="is called with a sample"):
        check_call(lambda: 1, {}, "reward.kind", "reward.options")


HANGING_EXIT = """
import asyncio, time
from limes.records import Sample
from limes.rewards.function import FunctionGrader
grader = FunctionGrader(lambda sample: time.sleep(600), name="slow", timeout_s=0.1)
print(asyncio.run(grader.grade([Sample(index=0, group_index=0)]))[0].error)
"""


def test_hanging_function_does_not_keep_the_process_from_ending():
    done = subprocess.run([sys.executable, "-c", HANGING_EXIT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("TimedOut")
    assert done.stderr == ""


def test_late_result_of_a_closed_loop_is_dropped():
    started = time.monotonic()
    found = grades(lambda sample: time.sleep(0.3), SAMPLES[:1], timeout_s=0.05)
    assert found[0].error.startswith("TimedOut")
    while any(thread.name == "limes-mine" for thread in threading.enumerate()):
        assert time.monotonic() - started < 30
        time.sleep(0.02)
