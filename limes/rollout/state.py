"""The rollout manager's part of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from limes.run.files import atomic_file, from_json, to_json

FILE = "rollout.json"


def write_state(folder: Path, rollout_id: int, cursor: dict[str, Any]) -> None:
    """Write the id of the last finished rollout and the state of the data cursor."""
    with atomic_file(folder / FILE, durable=True) as file:
        file.write(to_json({"rollout_id": rollout_id, "cursor": cursor}) + "\n")


def read_state(folder: Path) -> tuple[int, dict[str, Any]]:
    """Read what `write_state` wrote.

    Raises:
        ValueError: there is no such file, or it is not one of ours.
    """
    path = folder / FILE
    try:
        state = from_json(path.read_text(encoding="utf-8"))
        return int(state["rollout_id"]), dict(state["cursor"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"checkpoint.load = {str(folder)!r}: no usable {FILE} in it ({error}); "
            "name a checkpoint folder, such as runs/<name>/checkpoints/000010"
        ) from error
