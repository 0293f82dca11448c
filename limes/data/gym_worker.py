"""The process that generates the rows of a reasoning-gym task; see `gym.py`.

Reads a pickled request from standard input and writes pickled messages to standard output: `("entry", (entry, total))`
for each row, then `("done", None)`; or `("refused", why)`.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

from limes.data.prompts import near

Send = Callable[[str, Any], None]


def main() -> None:
    """Serve one request."""
    # Ctrl-C reaches the whole process group; the parent ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    request = pickle.load(sys.stdin.buffer)
    # Whatever a task prints must not mix with the messages.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def send(kind: str, value: Any) -> None:
        pickle.dump((kind, value), out)
        out.flush()

    generate(request["task"], request["options"], request["rows"], send)


def generate(task: str, options: dict[str, Any], rows: slice, send: Send) -> None:
    """Send the chosen rows of a task, or why there are none."""
    from reasoning_gym.factory import DATASETS, create_dataset

    if task not in DATASETS:
        send("refused", f"data.prompt_data = reasoning_gym:{task}: no such task; {near(task, DATASETS)}")
        return
    config_class = DATASETS[task][1]
    known = set(config_class.__dataclass_fields__)
    if unknown := sorted(set(options) - known):
        hint = near(unknown[0], known)
        send("refused", f"data.source_options.{unknown[0]}: reasoning_gym:{task} has no such option; {hint}")
        return
    random.seed(0)
    try:
        dataset = create_dataset(task, **options)
    except (AssertionError, ValueError, TypeError) as error:
        shown = ", ".join(f"{key} = {value!r}" for key, value in options.items())
        send("refused", f"data.source_options: reasoning_gym:{task} refuses {shown} ({type(error).__name__}: {error})")
        return
    chosen = range(len(dataset))[rows]
    for index in chosen:
        send("entry", (dataset[index], len(chosen)))
    send("done", None)


if __name__ == "__main__":
    main()
