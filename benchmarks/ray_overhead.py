"""What Ray costs beside one process, with a tiny model: seconds a step, and from the start to the first step.

    python benchmarks/ray_overhead.py [--steps 10] [--rounds 3]

Runs take turns, each in a process of its own. Overhead is the difference of the medians of all steps but each run's
first; the time to the first step counts everything from the command to the first step's end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import describe, matmul_gflops

ROOT = Path(__file__).parents[1]
ROWS = 32


def prepare(folder: Path) -> None:
    """A tiny model and prompts."""
    sys.path.append(str(ROOT / "tests"))
    from tiny import save_tiny

    save_tiny(folder / "model")
    rows = [{"prompt": f"say {number}", "label": str(number % 10)} for number in range(ROWS)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_once(kind: str, name: str, folder: Path, steps: int) -> tuple[float, list[float]]:
    """Train once; seconds to the end of the first step, and of each later one."""
    flags = {
        "model.path": folder / "model",
        "data.prompt_data": folder / "data.jsonl",
        "rollout.num_rollout": steps,
        "rollout.batch_size": 4,
        "rollout.n_samples_per_prompt": 4,
        "rollout.max_response_len": 32,
        "reward.kind": "last_integer",
        "run.dir": folder / "runs",
        "run.name": name,
        "run.num_shown_samples": 0,
        "model.device": "cpu",
        "cluster.kind": kind,
    }
    command = [sys.executable, "-m", "limes", "train"]
    command += [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    began = time.time()
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    found = [(line["time"] - began, line["perf/step_time_s"]) for line in lines if "perf/step_time_s" in line]
    return found[0][0], [seconds for _, seconds in found[1:]]


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(describe())
    starts: dict[str, list[float]] = {"local": [], "ray": []}
    steps: dict[str, list[float]] = {"local": [], "ray": []}
    with tempfile.TemporaryDirectory() as place:
        prepare(Path(place))
        for number in range(arguments.rounds):
            before = matmul_gflops()
            for kind in starts:
                start, rest = run_once(kind, f"{kind}{number}", Path(place), arguments.steps)
                starts[kind].append(start)
                steps[kind] += rest
                print(f"{kind}: first step after {start:.1f} s, then {1e3 * statistics.median(rest):.0f} ms a step")
            print(f"matrix product {before:.0f} .. {matmul_gflops():.0f} GFLOP/s, load {os.getloadavg()[0]:.1f}")
    medians = {kind: 1e3 * statistics.median(found) for kind, found in steps.items()}
    print(
        f"overhead {medians['ray'] - medians['local']:.0f} ms a step ({medians['local']:.0f} -> {medians['ray']:.0f})"
    )
    print(f"start to first step: local {min(starts['local']):.1f} s, Ray {min(starts['ray']):.1f} s (best of each)")


if __name__ == "__main__":
    main()
