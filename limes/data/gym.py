"""reasoning-gym tasks as a prompt source.

Rows are generated in a process of their own, whose hash seed and global random state are fixed: several tasks take
their questions from the order of a set or from `random`, and a resumed run must meet the same rows.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from limes.data.prompts import Row
from limes.data.tables import need_package

DEFAULTS = {"size": 500, "seed": 0}


def load_task(
    task: str, options: dict[str, Any], rows: slice, progress: Callable[[int, int], None] | None = None
) -> list[Row]:
    """Generate the rows of a task. Prompt and label are the entry's question and answer, and
    `metadata["reasoning_gym"]` holds `task` and the whole `entry`, so that the task's own verifier can grade.

    Args:
        task: a data set name of reasoning-gym.
        options: its settings; `size` is 500 and `seed` 0 unless given.
        rows: which rows to keep.
        progress: called with (rows done, rows in all).

    Raises:
        ValueError: reasoning-gym is missing, the task or an option is unknown, or the task refuses its options.
    """
    need_package("reasoning_gym", "gym", f"data.prompt_data = reasoning_gym:{task}")
    entries = _generate({"task": task, "options": DEFAULTS | options, "rows": rows}, progress)
    return [
        Row(prompt=entry["question"], label=entry["answer"], metadata={"reasoning_gym": {"task": task, "entry": entry}})
        for entry in entries
    ]


def _generate(request: dict[str, Any], progress: Callable[[int, int], None] | None) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    command = [sys.executable, "-m", "limes.data.gym_worker"]
    # The worker imports what this process would, and nothing from the folder it happens to start in.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONSAFEPATH": "1", "PYTHONPATH": path}
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment
        ) as worker,
    ):
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            pickle.dump(request, worker.stdin)
            worker.stdin.close()
            while True:
                kind, value = pickle.load(worker.stdout)
                if kind == "done":
                    return entries
                if kind == "refused":
                    raise ValueError(value)
                entry, total = value
                entries.append(entry)
                if progress is not None:
                    progress(len(entries), total)
        except (EOFError, BrokenPipeError) as error:
            errors.seek(0)
            last_words = errors.read().decode(errors="replace").strip()
            raise RuntimeError(f"generating reasoning_gym:{request['task']} failed:\n{last_words}") from error
        finally:
            worker.kill()
