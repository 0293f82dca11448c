from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from reward_cases import answered

from limes.rewards.maths import MathGrader, wrong
from limes.rewards.process import GraderError, OutOfMemory, TimedOut, WorkerDied, WorkerPool
from limes.rewards.regex import RegexGrader

CATASTROPHE = {"pattern": r"(a+)+$", "response": "a" * 40 + "b", "labels": None}
REGEX = "limes.rewards.regex_check"
EASY = {"pattern": "b", "response": "ab", "labels": None}


@pytest.fixture
def pool():
    """Regex workers: they start fast."""
    pool = WorkerPool(REGEX)
    yield pool
    pool.close()


def wait_until(condition) -> None:
    """Give the operating system a generous while."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_nothing_starts_before_the_first_call(pool):
    assert pool.pids == []


def test_one_process_serves_many_calls(pool):
    assert pool.call(EASY, 5) == 1.0
    (pid,) = pool.pids
    assert [pool.call(EASY, 5) for _ in range(20)] == [1.0] * 20
    assert pool.pids == [pid]


def test_out_of_time_kills_the_process_and_the_next_call_works(pool):
    pool.call(EASY, 5)
    (pid,) = pool.pids
    with pytest.raises(TimedOut, match=r"0\.2 s"):
        pool.call(CATASTROPHE, 0.2)
    assert not psutil.pid_exists(pid)
    assert pool.call(EASY, 5) == 1.0


def test_process_killed_between_calls_is_replaced(pool):
    pool.call(EASY, 5)
    os.kill(pool.pids[0], signal.SIGKILL)
    assert pool.call(EASY, 5) == 1.0


def test_process_killed_in_the_middle_gets_one_more_try(pool):
    pool.call(EASY, 5)
    (first,) = pool.pids
    outcome = []

    def run():
        try:
            outcome.append(pool.call(CATASTROPHE, 60))
        except GraderError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: busy(first))
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: pool.pids and pool.pids != [first] and busy(pool.pids[0]))
    os.kill(pool.pids[0], signal.SIGKILL)
    thread.join()
    (error,) = outcome
    assert isinstance(error, WorkerDied)
    assert "SIGKILL" in str(error)
    assert not error.own_fault
    assert pool.call(EASY, 5) == 1.0


def busy(pid: int) -> bool:
    """Whether a process has computed for more than starting takes."""
    return sum(psutil.Process(pid).cpu_times()[:2]) > 0.5


def test_two_workers_do_two_things_at_a_time():
    pool = WorkerPool(REGEX, num_workers=2)

    async def run():
        slow = asyncio.create_task(pool.call_async(CATASTROPHE, 3))
        await asyncio.to_thread(wait_until, lambda: pool.pids)
        assert await pool.call_async(EASY, 2) == 1.0
        assert not slow.done()
        with pytest.raises(TimedOut):
            await slow

    asyncio.run(run())
    pool.close()


def test_event_loop_goes_on_during_a_call(pool):
    async def run():
        ticks = 0
        call = asyncio.create_task(pool.call_async(CATASTROPHE, 0.5))
        while not call.done():
            await asyncio.sleep(0.01)
            ticks += 1
        with pytest.raises(TimedOut):
            await call
        return ticks

    assert asyncio.run(run()) > 1


def test_close_ends_processes_even_in_the_middle(pool):
    pool.call(EASY, 5)
    (pid,) = pool.pids
    outcome = []

    def run():
        with pytest.raises(GraderError) as caught:
            pool.call(CATASTROPHE, 60)
        outcome.append(caught.value)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: busy(pid))
    pool.close()
    thread.join()
    assert len(outcome) == 1
    assert not psutil.pid_exists(pid)
    with pytest.raises(GraderError, match="closed"):
        pool.call(EASY, 5)
    pool.close()
    assert pool.pids == []


def test_no_child_is_left_after_graders_close():
    before = set(psutil.Process().children(recursive=True))

    async def run():
        graders = [MathGrader(), RegexGrader(pattern="5", num_workers=2)]
        for grader in graders:
            await grader.grade([answered("5", "5")] * 4)
            assert set(psutil.Process().children(recursive=True)) - before
            await grader.close()
            await grader.close()

    asyncio.run(run())
    assert set(psutil.Process().children(recursive=True)) <= before


def test_pool_that_is_forgotten_ends_its_process():
    pool = WorkerPool(REGEX)
    pool.call(EASY, 5)
    (pid,) = pool.pids
    del pool
    assert not psutil.pid_exists(pid)


SCRIPT = """
import signal, sys, threading, time
from limes.rewards.process import WorkerPool
pool = WorkerPool("limes.rewards.regex_check")
if sys.argv[1] == "deaf":  # children inherit what is blocked
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM, signal.SIGIO])
pool.call({"pattern": "b", "response": "ab", "labels": None}, 5)
print(pool.pids[0], "torch" in sys.modules, flush=True)
if sys.argv[1] in ("busy", "deaf"):
    pool.call({"pattern": r"(a+)+$", "response": "a" * 40 + "b", "labels": None}, 1000)
elif sys.argv[1] == "idle":
    time.sleep(60)
elif sys.argv[1] == "forked":
    import os
    if os.fork():
        time.sleep(60)
    print(os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
"""


def start_parent(how: str) -> tuple[subprocess.Popen, int]:
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT, how], stdout=subprocess.PIPE, text=True)
    worker, torch_loaded = parent.stdout.readline().split()
    assert torch_loaded == "False"
    return parent, int(worker)


@pytest.mark.parametrize("how", ["idle", "busy", "deaf"])
def test_worker_does_not_outlive_a_killed_parent(how):
    parent, worker = start_parent(how)
    if how != "idle":
        wait_until(lambda: busy(worker))
    parent.kill()
    parent.communicate()
    wait_until(lambda: not running(worker))


@pytest.mark.slow
def test_worker_does_not_wait_for_those_who_inherited_its_socket():
    parent, worker = start_parent("forked")
    heir = int(parent.stdout.readline())
    parent.kill()
    wait_until(lambda: not running(worker))
    assert running(heir)
    os.kill(heir, signal.SIGKILL)
    parent.communicate()


def test_worker_does_not_outlive_a_parent_that_exits():
    parent, worker = start_parent("exit")
    assert parent.wait(30) == 0
    parent.communicate()
    wait_until(lambda: not running(worker))


def running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_forked_process_gets_a_worker_of_its_own(pool):
    pool.call(EASY, 5)
    (worker,) = pool.pids
    child = os.fork()
    if child == 0:
        good = pool.call(EASY, 5) == 1.0 and pool.pids != [worker]
        pool.close()
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.call(EASY, 5) == 1.0
    assert pool.pids == [worker]


def test_interrupted_call_cannot_answer_the_next_one(pool):
    """Ctrl-C while a reply is on its way: the next call must not get that reply."""
    pool.call(EASY, 5)
    previous = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            pool.call({"pattern": r"(a+)+$", "response": "a" * 25 + "b", "labels": None}, 30)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert pool.call(EASY, 5) == 1.0


def test_memory_is_limited():
    pool = WorkerPool(REGEX, memory_mb=64)
    with pytest.raises(OutOfMemory, match="64 MB"):
        pool.call({"pattern": "a", "response": "a" * 3_000_000, "labels": None}, 60)
    assert pool.call(EASY, 5) == 1.0
    pool.close()


def test_scorer_that_raises_is_an_error_and_keeps_its_process(pool):
    pool.call(EASY, 5)
    pids = pool.pids
    with pytest.raises(GraderError, match="KeyError"):
        pool.call({}, 5)
    assert pool.call(EASY, 5) == 1.0
    assert pool.pids == pids


def test_worker_that_cannot_load_says_why():
    pool = WorkerPool("module_nobody_has")
    with pytest.raises(GraderError, match=r"module_nobody_has process does not start: ModuleNotFoundError"):
        pool.call(EASY, 5)
    pool.close()


def test_request_of_a_class_that_only_the_parent_has(pool):
    class Local:
        pass

    Local.__qualname__, Local.__module__ = "Local", "reward_module_nobody_has"
    sys.modules["reward_module_nobody_has"] = type(sys)("reward_module_nobody_has")
    sys.modules["reward_module_nobody_has"].Local = Local
    try:
        with pytest.raises(GraderError, match="cannot be read in the worker process"):
            pool.call({**EASY, "labels": Local()}, 5)
    finally:
        del sys.modules["reward_module_nobody_has"]
    assert pool.call(EASY, 5) == 1.0


SCORER = """
import ctypes, os, sys, time
kept = []

def load():
    return score

def score(request):
    return {"leak": leak, "print": chat, "exit": leave, "abort": os.abort, "stdin": read}[request["do"]]()

def leak():
    kept.append(bytearray(40 * 2**20))
    return 1

def chat():
    print("{}", flush=True)
    os.write(1, b"nonsense")
    print("last words", file=sys.stderr, flush=True)
    return 1

def leave():
    print("last words", file=sys.stderr, flush=True)
    os._exit(7)

def read():
    return len(sys.stdin.read())
"""


@pytest.fixture
def odd_pool(tmp_path, monkeypatch):
    (tmp_path / "scorer_of_a_test.py").write_text(SCORER)
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = WorkerPool("scorer_of_a_test", memory_mb=64)
    yield pool
    pool.close()


def test_process_that_has_grown_is_replaced(odd_pool):
    for _ in range(4):
        assert odd_pool.call({"do": "leak"}, 10) == 1.0
        assert odd_pool.pids == []


def test_output_and_input_of_libraries_do_not_disturb(odd_pool):
    assert odd_pool.call({"do": "print"}, 10) == 1.0
    assert odd_pool.call({"do": "stdin"}, 10) == 0.0
    assert odd_pool.call({"do": "print"}, 10) == 1.0


@pytest.mark.parametrize(("how", "message"), [("exit", "exit code 7: last words"), ("abort", "SIGABRT")])
def test_process_that_ends_itself_twice_is_at_fault(odd_pool, how, message):
    with pytest.raises(WorkerDied, match=message) as caught:
        odd_pool.call({"do": how}, 10)
    assert caught.value.own_fault
    assert wrong(caught.value) == 0.0
    assert odd_pool.call({"do": "print"}, 10) == 1.0


def test_answer_is_not_to_blame_for_a_kill_from_outside():
    with pytest.raises(WorkerDied):
        wrong(WorkerDied("killed", own_fault=False))
    assert wrong(TimedOut("late")) == wrong(OutOfMemory("big")) == 0.0
