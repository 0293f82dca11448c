"""Checkpoint folders: whole or absent."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from limes.cluster.handles import RolloutManagerHandle, TrainGroup

UNFINISHED = ".unfinished"


async def save_checkpoint(
    models: Iterable[TrainGroup | None],
    manager: RolloutManagerHandle,
    rollout_id: int,
    checkpoints: Path,
    *,
    force_sync: bool,
    notice: Callable[[str], None],
) -> Path | None:
    """Write `<checkpoints>/<rollout id>`: weights, optimizers and schedules of all `models`, and the place in the data.

    It is written under another name and gets its own at the end, so a folder with a plain number is always complete.
    Cancelling waits for it: what has been learned is worth the seconds. Without a trainer there is nothing to save.
    """
    saved = [model for model in models if model is not None and model.has_workers]
    if not saved:
        return None
    folder = checkpoints / f"{rollout_id:06d}"
    unfinished = folder.with_suffix(UNFINISHED)
    unfinished.mkdir()

    async def write() -> Path:
        for model in saved:
            await model.save_model(rollout_id, unfinished, force_sync=force_sync)
        await manager.save(rollout_id, unfinished)
        return unfinished.rename(folder)

    writing = asyncio.ensure_future(write())
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        if not writing.done():
            notice(f"waiting for checkpoint {folder.name} to be written")
            await writing
        raise


def remove_unfinished(checkpoints: Path) -> None:
    """Remove what an interrupted save has left."""
    for folder in checkpoints.glob(f"*{UNFINISHED}"):
        shutil.rmtree(folder)
