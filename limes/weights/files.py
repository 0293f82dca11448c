"""Files of an update: in a folder that belongs to one living process, complete or absent."""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "sender-"


class OwnedFolder:
    """A folder of this process's own under a root that many may use.

    The kernel holds a lock on it for as long as this process lives, so that `remove_abandoned` finds what a killed
    process left behind. Making one removes abandoned ones.
    """

    def __init__(self, root: Path) -> None:
        self._made_root = not root.exists()
        root.mkdir(parents=True, exist_ok=True)
        remove_abandoned(root)
        self.path = root / f"{PREFIX}{uuid.uuid4().hex}"
        with _locked(root):
            self.path.mkdir()
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @contextmanager
    def new(self, name: str) -> Iterator[Path]:
        """A folder to write into; it gets its name, in place of an older one, once all of it is on the disk."""
        temporary, final = self.path / f"{name}.tmp", self.path / name
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            yield temporary
            for file in temporary.iterdir():
                sync(file)
            sync(temporary)
        except BaseException:
            shutil.rmtree(temporary)
            raise
        self.remove(name)
        temporary.rename(final)
        sync(self.path)

    def remove(self, name: str) -> None:
        """Remove a folder, if it is there."""
        if (self.path / name).exists():
            shutil.rmtree(self.path / name)

    def close(self, *, keep: bool = False) -> None:
        """Remove everything, unless it is to be kept; then it is no longer taken for abandoned."""
        if self._fd < 0:
            return
        if keep:
            self.path.rename(self.path.with_name(self.path.name.removeprefix(PREFIX)))
        else:
            shutil.rmtree(self.path)
        os.close(self._fd)
        self._fd = -1
        if self._made_root and not any(self.path.parent.iterdir()):
            self.path.parent.rmdir()


def remove_abandoned(root: Path) -> list[Path]:
    """Remove the folders of processes that are gone; returns them."""
    removed = []
    with _locked(root):
        for path in sorted(root.glob(f"{PREFIX}*")):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # its owner lives
            else:
                shutil.rmtree(path)
                removed.append(path)
            finally:
                os.close(fd)
    return removed


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One process at a time makes or removes folders."""
    fd = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
