"""Hand-over of what changed: each version as differences to the one before it, checked before engines use it.

The first update, and any to engines that do not hold the version before, is whole (`limes.weights.disk`). A delta
folder has the byte planes of all changes in one file and, in `index.json`, the two versions, and each weight's checksum
before and after.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from limes.weights.checksum import carried, checksum, words_of
from limes.weights.disk import FILE_NAME, DiskTransport, LoadWeights, version_name, write_weights
from limes.weights.encoding import Change, Plane, diff, move, moves
from limes.weights.messages import Describe
from limes.weights.names import Specs, WeightError
from limes.weights.receiver import EngineState, WeightReceiver
from limes.weights.source import WeightSource, checked_tensors
from limes.weights.transport import Peer, Sent, ask_all

CHANGES, INDEX = "changes.bin", "index.json"


class DeltaTransport:
    """Keeps a copy of the weights last sent, on their own device, and writes what changed since.

    Args:
        root, timeout_s, keep_files: see `DiskTransport`.
    """

    kind = "delta"

    def __init__(self, root: Path, *, timeout_s: float, keep_files: bool = False) -> None:
        self._disk = DiskTransport(root, timeout_s=timeout_s, keep_files=keep_files)
        self._specs: Specs = {}
        self._peers: Sequence[Peer] = ()
        self._kept: dict[str, Tensor] = {}
        self._sums: dict[str, int] = {}
        self._base: int | None = None
        self._is_whole, self._density = True, 1.0

    def connect(self, specs: Specs, peers: Sequence[Peer], states: Sequence[EngineState]) -> None:
        """See `Transport.connect`."""
        self._disk.connect(specs, peers, states)
        self._specs, self._peers = specs, peers
        self._kept, self._sums, self._base = {}, {}, None

    def prepare(self, source: WeightSource, version: int) -> None:
        """See `Transport.prepare`."""
        self._is_whole = not self._is_next(version)
        base, self._base = self._base, None  # the copy is of no version until engines have this one
        with self._disk.folder.new(version_name(version)) as path:
            tensors = checked_tensors(source, self._specs)
            if self._is_whole:
                write_weights(path / FILE_NAME, self._keeping(tensors), self._specs, version)
                self._density = 1.0
            else:
                assert base is not None
                self._density = self._write_changes(path, tensors, base, version)

    def send(self, source: WeightSource, version: int) -> Sent:
        """See `Transport.send`."""
        folder, timeout_s = self._disk.folder, self._disk.timeout_s
        path = folder.path / version_name(version)
        if self._is_whole:
            ask_all(self._peers, LoadWeights(str(path / FILE_NAME), version), timeout_s)
        else:
            ask_all(self._peers, ApplyDelta(str(path), version), timeout_s)
        self._base = version
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        if not self._disk.keep_files:
            folder.remove(version_name(version))
        return Sent(num_bytes, self._density)

    def limit_bytes_per_s(self) -> float:
        """See `Transport.limit_bytes_per_s`."""
        return self._disk.limit_bytes_per_s()

    def close(self) -> None:
        """See `Transport.close`."""
        self._kept, self._sums, self._base = {}, {}, None
        self._disk.close()

    def _is_next(self, version: int) -> bool:
        """Every engine holds the version that a delta to `version` starts from."""
        if self._base is None or version != self._base + 1:
            return False
        states: list[EngineState] = ask_all(self._peers, Describe(), self._disk.timeout_s)
        return all(state.intact and state.version == self._base for state in states)

    def _keeping(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self._kept[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
            self._sums[name] = checksum(tensor)
            yield name, tensor

    def _write_changes(self, path: Path, tensors: Iterator[tuple[str, Tensor]], base: int, version: int) -> float:
        """Write a delta folder; returns the share of words that changed."""
        index: dict[str, Any] = {}
        num_changed = num_words = 0
        with (path / CHANGES).open("wb") as file:
            for name, tensor in tensors:
                old, new = words_of(self._kept[name]), words_of(tensor)
                change = diff(old, new)
                before = self._sums[name]
                if change.num_changed:
                    old.copy_(new)
                    self._sums[name] = checksum(new)
                index[name] = {"before": before, "after": self._sums[name], **_write_change(file, change)}
                num_changed, num_words = num_changed + change.num_changed, num_words + len(old)
        text = json.dumps({"base": base, "version": version, "weights": index})
        (path / INDEX).write_text(text, encoding="utf-8")
        return num_changed / max(1, num_words)


@dataclass(frozen=True, slots=True)
class ApplyDelta:
    """Read a delta folder and change the weights."""

    path: str
    version: int

    def apply(self, receiver: WeightReceiver) -> None:
        """See `Message.apply`.

        Raises:
            WeightError: the engine does not hold the base, or the delta is broken; names the weight. Nothing is touched
                unless every weight is the base's, bit for bit.
        """
        path = Path(self.path)
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        base, version, entries = index["base"], index["version"], index["weights"]
        if (version, base) != (self.version, self.version - 1):
            raise WeightError(f"{path} leads from version {base} to {version}, not to {self.version}")
        if receiver.version != base or not receiver.intact:
            state = "" if receiver.intact else ", in parts"
            raise WeightError(f"the delta changes version {base}, but the engine has version {receiver.version}{state}")
        if other := set(entries) ^ set(receiver.weights):
            raise WeightError(f"the delta and the engine do not both have {', '.join(sorted(other)[:8])}")
        for name, tensor in receiver.weights.items():
            if checksum(tensor) != entries[name]["before"]:
                raise WeightError(f"{name} is not that of version {base}; the delta is refused")
        receiver.writing()
        with (path / CHANGES).open("rb") as file:
            for name, tensor in receiver.weights.items():
                if entries[name]["num_changed"]:
                    _change_weight(name, tensor, _read_change(file, entries[name]), entries[name])


def _change_weight(name: str, tensor: Tensor, change: Change, entry: dict[str, Any]) -> None:
    """Apply a change and check the result."""
    words = words_of(tensor)
    try:
        positions, moved = moves(change, words)
    except ValueError as error:
        raise WeightError(f"the change of {name} is broken: {error}") from error
    if positions is None:
        move(words, None, moved)
        total = checksum(words)
    else:
        old = words[positions]
        total = carried(entry["before"], positions, old, old + moved)
        move(words, positions, moved)
    if total != entry["after"]:
        raise WeightError(f"the checksum of {name} is wrong after the change")


def _write_change(file: BinaryIO, change: Change) -> dict[str, Any]:
    """Append the planes of a change; returns where they are."""
    found: dict[str, Any] = {"num_changed": change.num_changed, "is_dense": change.is_dense}
    for part in ("gaps", "differences"):
        found[part] = []
        for plane in getattr(change, part):
            found[part].append([plane.index, plane.deflated, file.tell(), len(plane.content)])
            file.write(plane.content)
    return found


def _read_change(file: BinaryIO, entry: dict[str, Any]) -> Change:
    """The change that `_write_change` wrote."""

    def planes(part: str) -> Iterator[Plane]:
        for place, deflated, start, num in entry[part]:
            file.seek(start)
            yield Plane(place, deflated, file.read(num))

    return Change(entry["num_changed"], entry["is_dense"], tuple(planes("gaps")), tuple(planes("differences")))
