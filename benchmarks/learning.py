"""Do the estimators learn? A model that starts from random weights learns to count, once for each estimator and seed.

    python benchmarks/learning.py [--estimators grpo ppo] [--seeds 1 2 3 4 5] [--workers 2] [--json FILE]

Each run is `limes train recipes/learning/ESTIMATOR.toml` in a process of its own with one thread; `--workers` of them
run at once. A seed is both `run.seed` and the seed of the random weights, so all estimators start from the same
models. Printed: the reward curve of every run, and a table with 95% intervals over the seeds (Student's t).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes" / "learning"
ESTIMATORS = (
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "ppo",
    "step_wise",
    "gspo",
    "cispo",
)
GOAL, WINDOW = 0.8, 5
HEADER = ("estimator", "seeds", "start", "mid", "end", "unseen", f"rollouts to {GOAL}", "seconds")

Run = dict[str, Any]


def make_models(folder: Path, seeds: Sequence[int]) -> None:
    """Write a model of random weights for each seed."""
    sys.path.insert(0, str(ROOT))
    task = importlib.import_module("recipes.learning.task")
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar a model
        for seed in seeds:
            task.save_model(model_folder(folder, seed), seed)


def model_folder(folder: Path, seed: int) -> Path:
    """Where the model of a seed lies."""
    return folder / f"model{seed}"


def run_once(estimator: str, seed: int, folder: Path, flags: Sequence[str]) -> Run:
    """Train once and read what happened; a run that fails has an `error` in place of its rewards."""
    name = f"{estimator}-{seed}"
    settings = {
        "model.path": model_folder(folder, seed),
        "run.seed": seed,
        "run.dir": folder / "runs",
        "run.name": name,
        "run.num_shown_samples": 0,
    }
    command = [sys.executable, "-m", "limes", "train", str(RECIPES / f"{estimator}.toml")]
    command += [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    log, started = folder / f"{name}.log", time.perf_counter()
    with log.open("w") as out:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        code = subprocess.call([*command, *flags], cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
    run: Run = {"estimator": estimator, "seed": seed, "seconds": time.perf_counter() - started}
    if code:
        run["error"] = f"exit code {code}: {' / '.join(log.read_text().splitlines()[-5:])}"
        print(f"{name}: {run['error']}", flush=True)
        return run
    lines = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    run["rewards"] = [line["rollout/reward_mean"] for line in lines if "rollout/reward_mean" in line]
    run["unseen"] = [line["eval/reward_mean"] for line in lines if "eval/reward_mean" in line][-1]
    run["entropy"] = [line["train/entropy"] for line in lines if "train/entropy" in line]
    run["logprob_abs_diff_max"] = max(line.get("train/logprob_abs_diff_max", 0.0) for line in lines)
    curve = " ".join(f"{reward:.2f}" for reward in run["rewards"])
    print(f"{name}: {curve}; unseen {run['unseen']:.2f}; {run['seconds']:.0f} s", flush=True)
    return run


def figures(rewards: Sequence[float]) -> dict[str, float | None]:
    """Start, mid and end of a reward curve, the latter two over `WINDOW` rollouts, and the rollouts until `GOAL`."""
    middle = (len(rewards) - WINDOW) // 2
    return {
        "start": rewards[0],
        "mid": statistics.fmean(rewards[middle : middle + WINDOW]),
        "end": statistics.fmean(rewards[-WINDOW:]),
        "reached": reached(rewards),
    }


def reached(rewards: Sequence[float]) -> float | None:
    """Rollouts trained on until the mean reward of two in a row is at least `GOAL`."""
    for rollout in range(1, len(rewards)):
        if (rewards[rollout - 1] + rewards[rollout]) / 2 >= GOAL:
            return float(rollout)
    return None


def with_interval(values: Sequence[float], digits: int = 2) -> str:
    """Mean and the half width of its 95% interval."""
    from limes.rollout.statistics import student_t

    mean = f"{statistics.fmean(values):.{digits}f}"
    if len(values) < 2:
        return mean
    half = student_t(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean} +-{half:.{digits}f}"


def row(estimator: str, runs: Sequence[Run]) -> tuple[str, ...]:
    """One line of the table."""
    good = [run for run in runs if "error" not in run]
    if not good:
        return (estimator, f"0 of {len(runs)}", *[""] * (len(HEADER) - 2))
    found = [figures(run["rewards"]) for run in good]
    goal = [at for figure in found if (at := figure["reached"]) is not None]
    misses = "" if len(goal) == len(good) else f" ({len(goal)} of {len(good)})"
    return (
        estimator,
        str(len(good)) if len(good) == len(runs) else f"{len(good)} of {len(runs)}",
        *(with_interval([figure[name] for figure in found]) for name in ("start", "mid", "end")),
        with_interval([run["unseen"] for run in good]),
        (with_interval(goal, 1) if goal else "never") + misses,
        f"{statistics.median(run['seconds'] for run in good):.0f}",
    )


def table(runs: Sequence[Run]) -> str:
    """The table in Markdown, estimators in the order of their first run."""
    names = list(dict.fromkeys(run["estimator"] for run in runs))
    rows = [HEADER, ("---", *["--:"] * (len(HEADER) - 1))]
    rows += [row(name, [run for run in runs if run["estimator"] == name]) for name in names]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def write(path: Path, machine: str, runs: Sequence[Run]) -> None:
    """All curves and the table as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, "table": table(runs), "runs": runs}, indent=1), encoding="utf-8")


def main() -> None:
    """Run all and print the table; exits with 1 when a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--estimators", nargs="+", default=list(ESTIMATORS), choices=ESTIMATORS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--workers", type=int, default=1, help="runs at once, one core each")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="where all curves and the table go")
    parser.add_argument("--set", nargs="*", default=[], metavar="SETTING=VALUE", help="settings over the recipes'")
    options = parser.parse_args()
    flags = ["--model.device", options.device]
    flags += [part for pair in options.set for part in (f"--{pair.partition('=')[0]}", pair.partition("=")[2])]
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {options.device}"
    machine += f", {options.workers} runs at once, a thread each"
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.workers) as pool:
        folder = Path(name)
        make_models(folder, options.seeds)
        # seeds outside: what was done when somebody gives up is a whole table of fewer seeds
        todo = [(estimator, seed) for seed in options.seeds for estimator in options.estimators]
        start = functools.partial(run_once, folder=folder, flags=flags)
        runs: list[Run] = []
        for run in pool.map(lambda pair: start(*pair), todo):
            runs.append(run)
            if options.json:  # after every run: what is done is not lost when the rest is stopped
                write(options.json, machine, runs)
    print(f"{machine}\n\n{table(runs)}")
    if any("error" in run for run in runs):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
