"""Whole runs on a Ray cluster of two nodes: the same as in one process, and over at once when a process dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from limes.run import read_metrics, read_samples, read_train_records
from limes.train import run_train

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray")

MARK = "LIMES_TEST_MARK"
SLOTS_OF_A_NODE = 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two nodes, and this process connected to the first."""
    import logging

    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": SLOTS_OF_A_NODE, "include_dashboard": False})
        try:
            nodes.add_node(num_cpus=SLOTS_OF_A_NODE)
            ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
            yield
        finally:
            ray.shutdown()
            nodes.shutdown()


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The process of each role of the latest run."""
    from limes.cluster.ray_session import RaySession

    found: dict[str, int] = {}
    locate = RaySession.locate

    def noted(self: RaySession, actors: list) -> None:
        locate(self, actors)
        found.clear()
        found.update({actor.name: actor.info.process_id for actor in actors})

    monkeypatch.setattr(RaySession, "locate", noted)
    return found


def samples_of(run: Path, rollout_id: int) -> list[tuple]:
    found = read_samples(run / "rollouts", rollout_id)
    return [(s.index, s.tokens, s.rollout_log_probs, s.reward, s.weight_versions) for s in found]


def records_of(run: Path, rollout_id: int) -> dict[int, tuple]:
    found = read_train_records(run / "rollouts", rollout_id)
    return {index: (record.advantages, record.log_probs) for index, record in found.items()}


def weights_of(run: Path, rollout_id: int, place: str = "model") -> bytes:
    return (run / "checkpoints" / f"{rollout_id:06d}" / place / "model.safetensors").read_bytes()


def calls_of(run: Path) -> list[str]:
    """Names of the calls, in the order they were made."""
    lines = (run / "spans.jsonl").read_text().splitlines()
    return [span["name"] for span in sorted(map(json.loads, lines), key=lambda span: span["start"])]


def gone(pids: list[int], deadline_s: float = 15.0) -> bool:
    """Whether the processes end; a zombie has ended."""
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
            return True
        time.sleep(0.1)
    return False


def test_one_rank_gives_the_same_bits_as_one_process(cluster, processes, settings, tmp_path: Path) -> None:
    options = {"eval__interval": 2, "run__num_shown_samples": 1, "rollout__num_rollout": 2}
    assert run_train(settings(run__name="local", **options)) == 0
    assert run_train(settings(run__name="ray", cluster__kind="ray", **options)) == 0
    local, remote = tmp_path / "runs" / "local", tmp_path / "runs" / "ray"
    for rollout_id in range(2):
        assert samples_of(remote, rollout_id) == samples_of(local, rollout_id)
        assert records_of(remote, rollout_id) == records_of(local, rollout_id)
    assert weights_of(remote, 1) == weights_of(local, 1)
    assert calls_of(remote) == calls_of(local)
    updates = [line for line in read_metrics(remote / "metrics.jsonl") if "perf/update_weights_bytes" in line]
    assert len(updates) == 3
    assert len(processes) == 3
    assert gone(list(processes.values()))


def test_two_ranks_and_two_engines_on_two_nodes(cluster, settings, tmp_path: Path) -> None:
    """Each engine gets whole groups, each rank its part of the samples; updates are checked weight by weight."""
    options = {"rollout__num_rollout": 2}
    apart = {
        "cluster__colocate": False,
        "cluster__actor_num_gpus_per_node": 2,
        "cluster__rollout_num_gpus": 2,
        "weights__check_update_equal": True,
    }
    assert run_train(settings(run__name="local", **options)) == 0
    assert run_train(settings(run__name="ray", cluster__kind="ray", **options, **apart)) == 0
    runs = [tmp_path / "runs" / name for name in ("local", "ray")]
    # an engine of two has fewer rows at a time, which moves last bits, and so do sums over ranks
    tokens = [[(s[1], s[3], s[4]) for s in samples_of(run, 0)] for run in runs]
    assert tokens[0] == tokens[1]
    for name in ("train/loss", "train/grad_norm", "rollout/reward_mean"):
        local, remote = ([line[name] for line in read_metrics(run / "metrics.jsonl") if name in line] for run in runs)
        assert remote == pytest.approx(local, rel=1e-4, abs=1e-6), name
    assert records_of(runs[1], 1).keys() == records_of(runs[0], 1).keys()
    assert not any("onload" in call or "offload" in call for call in calls_of(runs[1]))


def test_critic_offloading_and_levels_change_nothing(cluster, settings, tmp_path: Path) -> None:
    """A critic on its own device trains beside the actor; all memory leaves and comes back in every step."""
    ppo = {"algorithm__advantage_estimator": "ppo", "critic__num_critic_only_steps": 1, "rollout__num_rollout": 3}
    moving = {
        "cluster__colocate_critic": False,
        "cluster__rollout_num_gpus": 1,
        "cluster__offload_train": True,
        "cluster__offload_rollout_level": ["kv_cache", "weight"],
        "weights__transport": "ipc",
    }
    assert run_train(settings(run__name="local", **ppo)) == 0
    assert run_train(settings(run__name="ray", cluster__kind="ray", **ppo, **moving)) == 0
    local, remote = tmp_path / "runs" / "local", tmp_path / "runs" / "ray"
    for rollout_id in range(3):
        assert samples_of(remote, rollout_id) == samples_of(local, rollout_id)
    assert weights_of(remote, 2) == weights_of(local, 2)
    assert weights_of(remote, 2, "critic/model") == weights_of(local, 2, "critic/model")


@pytest.mark.parametrize("victim", ["rollout", "engine rank 0", "actor rank 0"])
def test_a_killed_process_ends_the_run_with_one_error(
    cluster, processes, settings, tmp_path: Path, victim: str, capfd: pytest.CaptureFixture
) -> None:
    killed: list[float] = []

    def kill() -> None:
        while not (tmp_path / "runs" / "r" / "rollouts" / "000001.samples.jsonl").exists():
            time.sleep(0.05)
        os.kill(processes[victim], signal.SIGKILL)
        killed.append(time.monotonic())

    threading.Thread(target=kill, daemon=True).start()
    assert run_train(settings(run__name="r", cluster__kind="ray", rollout__num_rollout=100_000)) == 1
    assert time.monotonic() - killed[0] < 30
    told = capfd.readouterr().err
    assert f"role '{victim}' has died on node" in told
    assert f"(process {processes[victim]})" in told
    assert "last lines of its log" in told
    assert told.count("failed: ") == 1
    assert "Traceback" not in told
    assert gone(list(processes.values()))


def test_what_a_role_refuses_is_refused_here(cluster, processes, settings) -> None:
    """The manager's `ValueError` arrives as it is, and nothing stays."""
    with pytest.raises(ValueError, match="no_such_grader"):
        run_train(
            settings(
                run__name="r",
                cluster__kind="ray",
                cluster__debug_rollout_only=True,
                reward__kind="tiny_graders:no_such_grader",
            )
        )
    assert gone(list(processes.values()))


def test_a_layout_that_the_cluster_has_not_is_refused_before_anything_starts(cluster, processes, settings) -> None:
    with pytest.raises(ValueError, match=r"ask for 6 devices \(actor 3, engines 3\), and the cluster has 4 CPUs on 2"):
        run_train(settings(cluster__kind="ray", cluster__colocate=False, cluster__actor_num_gpus_per_node=3))
    assert processes == {}


def marked(mark: str) -> list[str]:
    """Processes that were started, directly or not, with the mark in their environment."""
    found = []
    for process in psutil.process_iter(["pid", "name", "status"]):
        try:
            if process.environ().get(MARK) == mark and process.status() != "zombie":
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def until(condition: Callable[[], bool], deadline_s: float) -> bool:
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def test_ctrl_c_ends_a_ray_of_its_own(place: Path, tmp_path: Path) -> None:
    """`limes train` starts Ray, and takes everything down that it has started."""
    flags = {
        "model.path": place / "model",
        "data.prompt_data": place / "data.jsonl",
        "rollout.num_rollout": 100_000,
        "rollout.max_response_len": 12,
        "reward.kind": "math",
        "run.dir": tmp_path,
        "run.name": "r",
        "run.num_shown_samples": 0,
        "cluster.kind": "ray",
        "model.device": "cpu",
    }
    arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    mark = f"{os.getpid()}-{tmp_path}"
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = subprocess.Popen(
        [sys.executable, "-m", "limes", "train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environment, MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    assert process.stdout is not None
    told = []
    for line in process.stdout:
        told.append(line)
        if " 1/100000 " in line:
            break
    assert len(marked(mark)) > 3, told
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    rest = process.stdout.read().splitlines()
    assert process.wait(60) == 130
    assert sum("interrupted" in line for line in rest) == 1
    assert not any("Traceback" in line for line in rest)
    assert until(lambda: not marked(mark), 20), marked(mark)
