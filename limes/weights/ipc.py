"""Hand-over between processes of one host: the trainer writes into the engine's own weights, one copy in all.

On a GPU the engine gives out CUDA handles of its tensors. On a CPU it moves its weights into memory without a name
(memfd), which the kernel frees with the last process that has it; the trainer opens it through /proc.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from limes.weights.limits import memcpy_bytes_per_s
from limes.weights.messages import Disconnect
from limes.weights.names import Specs, TensorSpec, WeightError
from limes.weights.receiver import EngineState, WeightReceiver, gpu_id
from limes.weights.source import WeightSource, checked_tensors
from limes.weights.transport import Peer, Sent, ask_all

ALIGNMENT = 64
ELSEWHERE = "weights.transport = ipc needs trainer and engine on one host and in one container; use broadcast"


class IpcTransport:
    """Writes into engines on the same host.

    Args:
        bucket_bytes: how much of a GPU's weights are copied in one call, and held meanwhile.
        timeout_s: for an engine's answer.
    """

    kind = "ipc"

    def __init__(self, *, bucket_bytes: int, timeout_s: float) -> None:
        self.bucket_bytes, self.timeout_s = bucket_bytes, timeout_s
        self._specs: Specs = {}
        self._peers: Sequence[Peer] = ()
        self._targets: list[dict[str, Tensor]] = []

    def connect(self, specs: Specs, peers: Sequence[Peer], states: Sequence[EngineState]) -> None:
        """See `Transport.connect`."""
        self.close()
        tickets: list[Ticket] = ask_all(peers, ShareWeights(), self.timeout_s)
        self._peers, self._specs = peers, specs
        self._targets = [ticket.open(specs) for ticket in tickets]

    def prepare(self, source: WeightSource, version: int) -> None:
        """See `Transport.prepare`."""

    def send(self, source: WeightSource, version: int) -> Sent:
        """See `Transport.send`."""
        ask_all(self._peers, Overwrite(), self.timeout_s)
        num_bytes = held = 0
        bucket: list[tuple[str, Tensor]] = []
        for name, tensor in checked_tensors(source, self._specs):
            bucket.append((name, tensor))
            size = self._specs[name].num_bytes
            num_bytes, held = num_bytes + size, held + size
            if held >= self.bucket_bytes or tensor.device.type == "cpu":
                self._write(bucket)
                bucket, held = [], 0
        self._write(bucket)
        self._wait()
        return Sent(num_bytes)

    def limit_bytes_per_s(self) -> float:
        """See `Transport.limit_bytes_per_s`."""
        return memcpy_bytes_per_s(next(iter(self._targets[0].values())).device)

    def close(self) -> None:
        """See `Transport.close`."""
        self._targets = []  # unmaps them
        peers, self._peers = self._peers, ()
        disconnect(peers, self.timeout_s)

    @torch.no_grad()
    def _write(self, bucket: list[tuple[str, Tensor]]) -> None:
        for targets in self._targets:
            if len(bucket) > 1:
                torch._foreach_copy_([targets[name] for name, _ in bucket], [tensor for _, tensor in bucket])
            else:
                for name, tensor in bucket:
                    targets[name].copy_(tensor)

    def _wait(self) -> None:
        """Until the copies have landed: engines read on streams of their own."""
        for device in {t.device for targets in self._targets for t in targets.values() if t.device.type == "cuda"}:
            torch.cuda.synchronize(device)


def disconnect(peers: Sequence[Peer], timeout_s: float) -> None:
    """Tell engines that still live to let go of what the transport keeps there."""
    for peer, answer in [(peer, peer.ask(Disconnect())) for peer in peers]:
        try:
            answer.exception(timeout_s)  # an engine that is gone keeps nothing
        except TimeoutError as error:
            raise WeightError(f"{peer.name} did not disconnect within {timeout_s:g} s") from error


class SharedMemory:
    """Weights of a CPU engine in memory that other processes can open. They stay there, open or not."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.offsets, size = layout({name: TensorSpec.of(tensor) for name, tensor in weights.items()})
        self._fd = os.memfd_create("limes-weights", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self._fd, 0, size)  # too little memory is an error here, and not a signal later
            flat = map_memory(self._fd, size)
        except OSError as error:
            os.close(self._fd)
            raise WeightError(f"no {size} bytes of shared memory for the weights: {error}") from error
        for name, tensor in weights.items():
            view = view_of(flat, self.offsets[name], TensorSpec.of(tensor))
            view.copy_(tensor.detach())
            tensor.data = view
        self.addresses = {name: tensor.data_ptr() for name, tensor in weights.items()}

    def ticket(self) -> HostTicket:
        """What another process needs to open it."""
        found = os.fstat(self._fd)
        return HostTicket(boot_id(), os.getpid(), self._fd, (found.st_dev, found.st_ino), found.st_size, self.offsets)

    def close(self) -> None:
        """No other process can open it any more."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class Ticket:
    """How to reach an engine's weights."""

    def open(self, specs: Specs) -> dict[str, Tensor]:
        """The engine's tensors, to be written to."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class HostTicket(Ticket):
    """Weights in a CPU engine's shared memory."""

    boot_id: str
    process_id: int
    fd: int
    inode: tuple[int, int]
    size: int
    offsets: Mapping[str, int]

    def open(self, specs: Specs) -> dict[str, Tensor]:
        """See `Ticket.open`.

        Raises:
            WeightError: the engine is on another host, in another container or gone.
        """
        if self.boot_id != boot_id():
            raise WeightError(f"the engine is on another host; {ELSEWHERE}")
        try:
            fd = os.open(f"/proc/{self.process_id}/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise WeightError(f"cannot open the engine's memory: {error}; {ELSEWHERE}") from error
        try:
            found = os.fstat(fd)
            if (found.st_dev, found.st_ino) != self.inode:
                raise WeightError(f"process {self.process_id} is not the engine; {ELSEWHERE}")
            flat = map_memory(fd, self.size)
        finally:
            os.close(fd)
        return {name: view_of(flat, self.offsets[name], spec) for name, spec in specs.items()}


@dataclass(frozen=True, slots=True)
class CudaTicket(Ticket):
    """CUDA handles of a GPU engine's tensors. Devices are numbered anew in each process, so they go by id."""

    gpu_id: str
    handles: Mapping[str, tuple[Any, ...]]

    def open(self, specs: Specs) -> dict[str, Tensor]:
        """See `Ticket.open`.

        Raises:
            WeightError: this process does not see the engine's GPU.
        """
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        seen = {gpu_id(index): index for index in range(torch.cuda.device_count())}
        if self.gpu_id not in seen:
            raise WeightError(f"the trainer does not see the engine's GPU {self.gpu_id}, only {list(seen)}")
        torch.cuda.init()
        found = {}
        for name in specs:
            values = list(self.handles[name])
            values[HANDLE_DEVICE] = seen[self.gpu_id]
            found[name] = rebuild_cuda_tensor(*values)
        return found


HANDLE_DEVICE = 6  # place of the device's number in the arguments of torch's rebuild_cuda_tensor


class CudaHandles:
    """Handles that a GPU engine gives out for its tensors."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        self.addresses = {name: tensor.data_ptr() for name, tensor in weights.items()}
        self._gpu_id = gpu_id(next(iter(weights.values())).device.index)
        self._handles = {}
        for name, tensor in weights.items():
            if tensor.device.type != "cuda":
                raise WeightError(f"the engine's {name} is on {tensor.device}, others are on a GPU")
            _, values = reduce_tensor(tensor.detach())
            assert values[HANDLE_DEVICE] == tensor.device.index, "torch has changed its handles"
            self._handles[name] = values

    def ticket(self) -> CudaTicket:
        """What another process needs to open them."""
        return CudaTicket(self._gpu_id, self._handles)

    def close(self) -> None:
        """Forget them."""
        self._handles = {}


@dataclass(frozen=True, slots=True)
class ShareWeights:
    """Make the weights reachable for another process."""

    def apply(self, receiver: WeightReceiver) -> Ticket:
        """See `Message.apply`."""
        link: SharedMemory | CudaHandles
        link = CudaHandles(receiver.weights) if receiver.device.type == "cuda" else SharedMemory(receiver.weights)
        receiver.set_link(link)
        return link.ticket()


@dataclass(frozen=True, slots=True)
class Overwrite:
    """The trainer is about to write."""

    def apply(self, receiver: WeightReceiver) -> None:
        """See `Message.apply`.

        Raises:
            WeightError: weights have moved in memory since they were shared.
        """
        link = receiver.link(CudaHandles if receiver.device.type == "cuda" else SharedMemory)
        moved = [name for name, address in receiver.addresses().items() if address != link.addresses[name]]
        if moved:
            raise WeightError(f"{', '.join(moved[:4])} moved in memory since the weights were shared; connect again")
        receiver.writing()


def layout(specs: Specs) -> tuple[dict[str, int], int]:
    """Offset of each weight in one allocation, and its size."""
    offsets, size = {}, 0
    for name, spec in specs.items():
        offsets[name] = size
        size += -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT
    return offsets, max(size, ALIGNMENT)


def map_memory(fd: int, size: int) -> Tensor:
    """The memory of a file descriptor as uint8 `[size]`; unmapped with the last tensor on it."""
    return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)


def view_of(flat: Tensor, offset: int, spec: TensorSpec) -> Tensor:
    """A tensor in an allocation."""
    return flat[offset : offset + spec.num_bytes].view(spec.dtype).view(spec.shape)


def boot_id() -> str:
    """Names this host, since it was started."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
