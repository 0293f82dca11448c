"""The quick start, timed as a newcomer meets it: conversion of the model, loading, training; one run a seed.

    python benchmarks/quickstart.py [--seeds 1 2 3] [--recipe recipes/quickstart.toml]

Each run starts with an empty model cache in a process of its own. Printed: the reward curve, seconds from the start
until the mean reward of three rollouts in a row is at least 0.9, peak memory of the process tree, and the machine's
matrix-product speed before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from machine import describe, matmul_gflops

GOAL, WINDOW = 0.9, 3


def run_once(recipe: str, seed: int, folder: Path) -> None:
    """Train once and print what happened."""
    before = matmul_gflops()
    command = [sys.executable, "-m", "limes", "train", recipe, "--run.seed", str(seed), "--run.dir", str(folder)]
    command += ["--run.name", f"seed{seed}"]
    environment = os.environ | {"LIMES_CACHE": str(folder / f"cache{seed}")}
    started, began = time.perf_counter(), time.time()
    with (folder / f"seed{seed}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        peak = watch_memory(process)
    seconds = time.perf_counter() - started
    if process.returncode:
        raise SystemExit(f"seed {seed} ended with {process.returncode}:\n{(folder / f'seed{seed}.log').read_text()}")
    lines = [json.loads(line) for line in (folder / f"seed{seed}" / "metrics.jsonl").read_text().splitlines()]
    rewards = [(line["time"] - began, line["rollout/reward_mean"]) for line in lines if "rollout/reward_mean" in line]
    print(f"seed {seed}: reward " + " ".join(f"{reward:.2f}" for _, reward in rewards))
    reached = first_reached(rewards)
    goal = "not reached" if reached is None else f"after {reached[0]:.0f} s, rollout {reached[1]}"
    print(
        f"seed {seed}: reward >= {GOAL} over {WINDOW} rollouts {goal}; whole run {seconds:.0f} s; "
        f"peak memory {peak / 1e9:.2f} GB; matrix product {before:.0f} .. {matmul_gflops():.0f} GFLOP/s"
    )


def first_reached(rewards: list[tuple[float, float]]) -> tuple[float, int] | None:
    """Seconds and rollout at which the mean of the last rollouts first reached the goal."""
    for end in range(WINDOW, len(rewards) + 1):
        if sum(reward for _, reward in rewards[end - WINDOW : end]) / WINDOW >= GOAL:
            return rewards[end - 1][0], end - 1
    return None


def watch_memory(process: subprocess.Popen[bytes]) -> int:
    """Wait for the process; returns the peak resident memory of it and its children, in bytes."""
    peak, root = 0, psutil.Process(process.pid)
    while process.poll() is None:
        try:
            peak = max(peak, sum(p.memory_info().rss for p in [root, *root.children(recursive=True)]))
        except psutil.NoSuchProcess:
            continue
        time.sleep(0.5)
    return peak


def main() -> None:
    """Run all seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--recipe", default="recipes/quickstart.toml")
    options = parser.parse_args()
    print(describe(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            run_once(options.recipe, seed, Path(folder))


if __name__ == "__main__":
    main()
