"""Names in a checkpoint folder, and whether it is whole."""

from __future__ import annotations

from pathlib import Path

MODEL = "model"
OPTIMIZER = "optimizer.safetensors"
"""Of a single rank; those of several have a number in their names."""
TRAINER = "trainer.json"
CRITIC = "critic"
"""Folder of the critic's own three, inside the actor's."""


def optimizer_file(rank: int, num: int) -> str:
    """Name of one rank's file."""
    stem, _, end = OPTIMIZER.rpartition(".")
    return f"{stem}-{rank:05d}-of-{num:05d}.{end}"


def optimizer_files(folder: Path) -> list[Path]:
    """The optimizer's files: one, or one a rank; none where there is no checkpoint.

    Raises:
        ValueError: some ranks' are missing.
    """
    if (folder / OPTIMIZER).exists():
        return [folder / OPTIMIZER]
    found = sorted(folder.glob(optimizer_file(0, 0).replace("00000", "*")))
    num = int(found[0].stem.rpartition("-of-")[2]) if found else 0
    if len(found) != num:
        raise ValueError(f"checkpoint.load = {folder}: it has {len(found)} of the {num} optimizer files")
    return found


def refuse_incomplete(folder: Path) -> None:
    """A worker's part of a checkpoint is whole.

    Raises:
        ValueError: it is not.
    """
    missing = [name for name in (MODEL, OPTIMIZER, TRAINER) if not (folder / name).exists()]
    if OPTIMIZER in missing and optimizer_files(folder):
        missing.remove(OPTIMIZER)
    if missing:
        raise ValueError(f"checkpoint.load = {folder}: not a checkpoint, it lacks {', '.join(missing)}")
