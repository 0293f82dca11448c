"""The cache of converted models: folders that are complete or not there.

A folder is built in a hidden scratch folder beside its place, gets its manifest last, and is renamed into place. One
process at a time builds a given package's model; another waits for it and takes the result.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Notice = Callable[[str], None]

MANIFEST = "limes_source.json"
FORMAT = 1
"""Raised when the conversion changes, so that older folders are made anew."""
WAIT_S = 1800


@dataclass(frozen=True)
class Cached:
    """A converted model that is ready to be put into the cache, and where it came from."""

    folder: Path
    package: str
    version: str
    licence: str
    gguf: Path


def models_folder() -> Path:
    """`$LIMES_CACHE/models`, or `~/.cache/limes/models`."""
    return Path(os.environ.get("LIMES_CACHE") or Path.home() / ".cache" / "limes").expanduser() / "models"


def find_cached(package: str, version: str | None, size: int | None) -> Path | None:
    """A complete conversion of a package's model, found by name, version and file size without reading weights.

    Args:
        package: normalised package name.
        version: its version; None takes the one converted last.
        size: bytes of the GGUF file, when it is at hand.
    """
    found = [folder for folder in models_folder().glob(f"{package}-*") if _matches(folder, package, version, size)]
    return max(found, key=lambda folder: (folder / MANIFEST).stat().st_mtime_ns, default=None)


def publish(
    package: str, version: str | None, size: int | None, make: Callable[[Path], Cached], notice: Notice
) -> Path:
    """Let `make` build a model in a scratch folder and move it into the cache, or take what another process made.

    Raises:
        ValueError: another process has held the cache for too long.
    """
    root = models_folder()
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / f".{package}.lock", package, notice):
        if folder := find_cached(package, version, size):
            return folder
        # Scratch folders found under the lock belong to processes that were killed.
        for left in root.glob(f".{package}.*.tmp"):
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix=f".{package}.", suffix=".tmp", dir=root) as scratch:
            made = make(Path(scratch))
            digest = _sha256(made.gguf)
            final = root / f"{package}-{digest[:12]}"
            _describe(made, digest)
            if final.exists():
                shutil.rmtree(final)
            made.folder.rename(final)
    return final


def _matches(folder: Path, package: str, version: str | None, size: int | None) -> bool:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return (
        manifest["format"] == FORMAT
        and manifest["package"] == package
        and version in (None, manifest["version"])
        and size in (None, manifest["gguf_bytes"])
        and _sizes(folder) == manifest["files"]
    )


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != MANIFEST}


def _describe(made: Cached, digest: str) -> None:
    """Write where the model comes from, for people and then, last, for `find_cached`."""
    (made.folder / "SOURCE.md").write_text(
        f"This model was converted by limes from {made.gguf.name} (sha256 {digest}),\n"
        f"which the Python package {made.package} {made.version} carries. Licence of that package: {made.licence}.\n"
        "Its quantised weights were expanded to float32 and are otherwise unchanged.\n",
        encoding="utf-8",
    )
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "package": made.package,
        "version": made.version,
        "licence": made.licence,
        "gguf": made.gguf.name,
        "gguf_bytes": made.gguf.stat().st_size,
        "gguf_sha256": digest,
        "files": _sizes(made.folder),
    }
    (made.folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(path: Path, package: str, notice: Notice) -> Iterator[None]:
    """Hold an exclusive lock that the system releases when this process ends, however it ends."""
    with path.open("a+") as file:
        deadline, told = time.monotonic() + WAIT_S, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = path.read_text(encoding="utf-8").strip() or "unknown"
                if time.monotonic() > deadline:
                    raise ValueError(
                        f"model.path = pypi:{package}: process {holder} has been converting it for {WAIT_S} s; "
                        "end that process or wait, then start again"
                    ) from None
                if not told:
                    notice(f"waiting for process {holder}, which is converting {package}")
                    told = True
                time.sleep(0.2)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
