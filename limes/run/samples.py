"""The samples and training records of each rollout, on disk.

`<rollout id>.samples.jsonl` has one line a sample, with every field of `Sample`; `<rollout id>.train.jsonl` has what
training made of them, one line a sample, joined by `index`. Files appear whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from limes.records import Sample, Status
from limes.run.files import atomic_file, from_json, to_json

SampleKind = Literal["samples", "eval"]


@dataclass(slots=True)
class TrainRecord:
    """What training computed for one sample. Lists have one entry a response token."""

    index: int
    advantages: float | list[float]
    """One for the whole sample, or one a response token."""
    old_log_probs: list[float] | None = None
    """Log-probs before the rollout's first optimizer step; None where they equal the trainer's own."""
    log_probs: list[float] | None = None
    """Log-probs of the trainer."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Whatever else is worth keeping, such as values or returns."""


def samples_path(folder: Path, rollout_id: int, kind: SampleKind = "samples") -> Path:
    """The file of a rollout's samples in `RunFolder.rollouts`; `eval` is that of the evaluation after that rollout."""
    return folder / f"{rollout_id:06d}.{kind}.jsonl"


def train_path(folder: Path, rollout_id: int, rank: int | None = None) -> Path:
    """The file of a rollout's training records; each data-parallel rank has its own when there are several."""
    return folder / (
        f"{rollout_id:06d}.train.jsonl" if rank is None else f"{rollout_id:06d}.train.rank{rank:04d}.jsonl"
    )


def write_samples(folder: Path, rollout_id: int, samples: Iterable[Sample], kind: SampleKind = "samples") -> Path:
    """Write the samples of a rollout into `RunFolder.rollouts` and return the file."""
    path = samples_path(folder, rollout_id, kind)
    with atomic_file(path) as file:
        for sample in samples:
            file.write(to_json(_encode(sample)) + "\n")
    return path


def read_samples(folder: Path, rollout_id: int, kind: SampleKind = "samples") -> list[Sample]:
    """Read the samples of a rollout.

    Raises:
        ValueError: a line is not a sample.
        FileNotFoundError: the rollout was not written.
    """
    samples = []
    path = samples_path(folder, rollout_id, kind)
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                samples.append(_decode(from_json(line)))
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}, line {number}: not a sample ({error})") from error
    return samples


def write_train_records(folder: Path, rollout_id: int, records: Iterable[TrainRecord], rank: int | None = None) -> Path:
    """Write what training made of a rollout into `RunFolder.rollouts` and return the file.

    Ranks that write at the same time must each give their `rank`.
    """
    path = train_path(folder, rollout_id, rank)
    with atomic_file(path) as file:
        for record in records:
            file.write(to_json(_by_name(record)) + "\n")
    return path


def read_train_records(folder: Path, rollout_id: int) -> dict[int, TrainRecord]:
    """Read the training records of a rollout, of all ranks, by sample index.

    Raises:
        ValueError: a line is not a record, or two are of the same sample.
    """
    records: dict[int, TrainRecord] = {}
    for path in sorted(folder.glob(f"{rollout_id:06d}.train*.jsonl")):
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                try:
                    record = TrainRecord(**from_json(line))
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{path}, line {number}: not a training record ({error})") from error
                if record.index in records:
                    raise ValueError(f"{path}, line {number}: sample {record.index} was there before")
                records[record.index] = record
    return records


def _encode(sample: Sample) -> dict[str, Any]:
    """All fields by name; versions, which change once or twice a sample, as [version, count] pairs."""
    line = _by_name(sample)
    line["status"] = sample.status.value
    line["weight_versions"] = run_lengths(sample.weight_versions)
    return line


def _by_name(record: Sample | TrainRecord) -> dict[str, Any]:
    return {item.name: getattr(record, item.name) for item in fields(record)}


def _decode(line: dict[str, Any]) -> Sample:
    versions = [version for version, count in line["weight_versions"] for _ in range(count)]
    return Sample(**{**line, "status": Status(line["status"]), "weight_versions": versions})


def run_lengths(values: Sequence[int]) -> list[list[int]]:
    """Run-length encoding: [[value, count], ...]."""
    return [[value, sum(1 for _ in run)] for value, run in groupby(values)]
