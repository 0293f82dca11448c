"""The folder of a run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

from limes.config.run import RunConfig
from limes.run.files import atomic_file


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A fresh `<run.dir>/<name>/` and the places in it. Nothing of an older run is ever read or written."""

    path: Path

    @classmethod
    def create(cls, run: RunConfig, default_name: str) -> RunFolder:
        """Make the folder. Without `run.name` it is `<default_name>-<date>-<time>`, with a number behind if taken.

        Raises:
            ValueError: `run.name` is not a plain folder name or exists already, or the folder cannot be made.
        """
        parent = Path(run.dir).expanduser()
        try:
            parent.mkdir(parents=True, exist_ok=True)
            path = _make_default(parent, default_name) if run.name is None else _make_named(parent, run.name)
            folder = cls(path)
            folder.rollouts.mkdir()
            folder.checkpoints.mkdir()
        except OSError as error:
            raise ValueError(
                f"run.dir = {run.dir!r}: cannot make a run folder there ({error}); give another run.dir"
            ) from error
        return folder

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.path.name

    @property
    def rollouts(self) -> Path:
        """Folder of the samples and training records of every rollout."""
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def config(self) -> Path:
        """The resolved settings."""
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        """One JSON line for each call of `MetricLog.log`."""
        return self.path / "metrics.jsonl"

    @property
    def spans(self) -> Path:
        """One JSON line for each span of time."""
        return self.path / "spans.jsonl"

    @property
    def reward_curve(self) -> Path:
        """The picture of the reward."""
        return self.path / "reward.png"

    def write_config(self, toml_text: str) -> Path:
        """Write the resolved settings and return the file."""
        with atomic_file(self.config) as file:
            file.write(toml_text)
        return self.config


def _make_named(parent: Path, name: str) -> Path:
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"run.name = {name!r}: must be a plain folder name; put the place into run.dir")
    path = parent / name
    try:
        path.mkdir()
    except FileExistsError:
        raise ValueError(
            f"run.name = {name!r}: {path} exists already, and a run never writes into an older one; "
            "give another run.name, or none to get one with date and time"
        ) from None
    return path


def _make_default(parent: Path, default_name: str) -> Path:
    """`mkdir` itself decides who has a name, so runs started together never share a folder."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", default_name).strip("-.") or "run"
    base = f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"
    for number in count(1):
        path = parent / (base if number == 1 else f"{base}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("count() ended")
