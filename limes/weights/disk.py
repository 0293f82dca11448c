"""Hand-over through files: all weights as safetensors, written tensor by tensor, read by every engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from limes.weights.files import OwnedFolder
from limes.weights.limits import disk_write_bytes_per_s
from limes.weights.names import Specs, TensorSpec, WeightError, as_bytes, check_agreement
from limes.weights.receiver import EngineState, WeightReceiver
from limes.weights.source import WeightSource, checked_tensors
from limes.weights.transport import Peer, Sent, ask_all

FILE_NAME = "model.safetensors"
TYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
    torch.complex64: "C64",
}


class DiskTransport:
    """Writes a folder for each version before engines stop, which then read it.

    Args:
        root: a folder that all engines see; this process makes one of its own in it.
        timeout_s: for an engine to read everything.
        keep_files: leave every version where it was written.
    """

    kind = "disk"

    def __init__(self, root: Path, *, timeout_s: float, keep_files: bool = False) -> None:
        self.root, self.timeout_s, self.keep_files = root, timeout_s, keep_files
        self._folder: OwnedFolder | None = None
        self._specs: Specs = {}
        self._peers: Sequence[Peer] = ()

    @property
    def folder(self) -> OwnedFolder:
        """Where this process writes."""
        if self._folder is None:
            self._folder = OwnedFolder(self.root)
        return self._folder

    def connect(self, specs: Specs, peers: Sequence[Peer], states: Sequence[EngineState]) -> None:
        """See `Transport.connect`."""
        for name, spec in specs.items():
            if spec.dtype not in TYPES:
                raise WeightError(f"{name} is {spec.dtype}, which safetensors files do not hold")
        self._specs, self._peers = specs, peers

    def prepare(self, source: WeightSource, version: int) -> None:
        """See `Transport.prepare`."""
        with self.folder.new(version_name(version)) as path:
            write_weights(path / FILE_NAME, checked_tensors(source, self._specs), self._specs, version)

    def send(self, source: WeightSource, version: int) -> Sent:
        """See `Transport.send`."""
        path = self.folder.path / version_name(version) / FILE_NAME
        ask_all(self._peers, LoadWeights(str(path), version), self.timeout_s)
        num_bytes = path.stat().st_size
        if not self.keep_files:
            self.folder.remove(version_name(version))
        return Sent(num_bytes)

    def limit_bytes_per_s(self) -> float:
        """See `Transport.limit_bytes_per_s`."""
        return disk_write_bytes_per_s(self.folder.path)

    def close(self) -> None:
        """See `Transport.close`."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close(keep=self.keep_files)


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Read all weights from a file."""

    path: str
    version: int

    def apply(self, receiver: WeightReceiver) -> None:
        """See `Message.apply`.

        Raises:
            WeightError: the file has other weights or another version; nothing is touched then.
        """
        with safe_open(self.path, framework="pt", device=str(receiver.device)) as file:
            check_agreement(_specs_in(file), receiver.specs, "the engine")
            found = (file.metadata() or {}).get("version")
            if found != str(self.version):
                raise WeightError(f"{self.path} holds version {found}, not {self.version}")
            receiver.writing()
            with torch.no_grad():
                for name, tensor in receiver.weights.items():
                    tensor.copy_(file.get_tensor(name))


def version_name(version: int) -> str:
    """Folder of a version."""
    return f"v{version:08d}"


def write_weights(path: Path, tensors: Iterator[tuple[str, Tensor]], specs: Specs, version: int) -> None:
    """Write a safetensors file without holding more than a tensor of it."""
    with path.open("wb") as file:
        file.write(safetensors_header(specs, version))
        for _, tensor in tensors:
            file.write(as_bytes(tensor).cpu().numpy().data)


def safetensors_header(specs: Specs, version: int) -> bytes:
    """What stands before the tensors' bytes, which follow in order and without gaps."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "version": str(version)}}
    start = 0
    for name, spec in specs.items():
        end = start + spec.num_bytes
        entries[name] = {"dtype": TYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _specs_in(file: safe_open) -> Specs:
    types = {name: dtype for dtype, name in TYPES.items()}
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    return {name: TensorSpec(tuple(part.get_shape()), types[part.get_dtype()]) for name, part in slices.items()}
