"""Hand-over through a torch.distributed group of the sending trainer rank and all engines: gloo on CPUs, NCCL on GPUs.

The group is an object of its own: it neither needs nor touches the process's default group. Each bucket ends in a byte
that says whether more will follow: a trainer that fails between two buckets tells the engines so.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from limes.weights.buckets import Bucket, cut_buckets, packed, unpack
from limes.weights.ipc import disconnect
from limes.weights.limits import memcpy_bytes_per_s
from limes.weights.names import Specs, WeightError
from limes.weights.receiver import EngineState, WeightReceiver, gpu_id
from limes.weights.source import WeightSource, checked_tensors
from limes.weights.transport import Peer, Sent, wait_all

POLL_S = 0.0005
NUM_BUFFERS = 2
GOES_ON, BROKE_OFF = 0, 1


class BrokenGroupError(WeightError):
    """Nothing more can be sent or received."""


class BroadcastTransport:
    """Sends every bucket to all engines at once, packing one while another travels.

    Args:
        bucket_bytes: size of a bucket; two are held on each side.
        timeout_s: for an engine's answer, and for one bucket.
        device: of the trainer's weights; `cuda` means NCCL, and engines on GPUs of their own.
        host: address at which engines reach this process; None takes this machine's.
    """

    kind = "broadcast"

    def __init__(self, *, bucket_bytes: int, timeout_s: float, device: torch.device, host: str | None = None) -> None:
        self.bucket_bytes, self.timeout_s = bucket_bytes, timeout_s
        self.device, self.host = device, host
        self._specs: Specs = {}
        self._peers: Sequence[Peer] = ()
        self._group: BroadcastGroup | None = None

    def connect(self, specs: Specs, peers: Sequence[Peer], states: Sequence[EngineState]) -> None:
        """See `Transport.connect`."""
        self.close()
        own_gpu = gpu_id(self.device.index) if self.device.type == "cuda" else None
        for peer, state in zip(peers, states, strict=True):
            if state.gpu_id is not None and state.gpu_id == own_gpu:
                raise WeightError(f"weights.transport = broadcast: {peer.name} is on the trainer's own GPU; use ipc")
            if torch.device(state.device).type != self.device.type:
                raise WeightError(
                    f"weights.transport = broadcast: {peer.name} is on {state.device}, the trainer on {self.device}"
                )
        self._specs, self._peers = dict(specs), peers
        host = self.host or local_address()
        store = dist.TCPStore(host, 0, len(peers) + 1, True, timedelta(seconds=self.timeout_s), wait_for_workers=False)
        join = [
            JoinGroup(host, store.port, rank, len(peers) + 1, self._specs, self.bucket_bytes, self.timeout_s)
            for rank in range(1, len(peers) + 1)
        ]
        answers = [peer.ask(message) for peer, message in zip(peers, join, strict=True)]
        self._group = BroadcastGroup(store, 0, len(peers) + 1, self.device, self.timeout_s)
        wait_all(peers, answers, "JoinGroup", self.timeout_s)

    def prepare(self, source: WeightSource, version: int) -> None:
        """See `Transport.prepare`."""

    def send(self, source: WeightSource, version: int) -> Sent:
        """See `Transport.send`."""
        group, self._group = self._group, None
        if group is None:
            raise WeightError("the group broke in an earlier update; connect again")
        buckets = cut_buckets(self._specs, self.bucket_bytes)
        answers = [peer.ask(ReceiveBuckets()) for peer in self._peers]
        buffers = Buffers(group, buckets, lambda: self._check(answers))
        try:
            for _ in packed(checked_tensors(source, self._specs), buckets, buffers.take):
                buffers.start(GOES_ON)
            buffers.wait_all()
            wait_all(self._peers, answers, "ReceiveBuckets", self.timeout_s)
        except BrokenGroupError:
            group.close()
            raise
        except BaseException as error:
            self._break_off(group, buffers, error)
            raise
        self._group = group
        return Sent(sum(bucket.num_bytes for bucket in buckets))

    def limit_bytes_per_s(self) -> float:
        """See `Transport.limit_bytes_per_s`."""
        return memcpy_bytes_per_s(self.device)

    def close(self) -> None:
        """See `Transport.close`."""
        if self._group is not None:
            self._group.close()
        self._group = None
        peers, self._peers = self._peers, ()
        disconnect(peers, self.timeout_s)

    def _check(self, answers: list[Future[Any]]) -> None:
        """Raise if an engine has failed; the others wait for it, and so does the trainer."""
        for peer, answer in zip(self._peers, answers, strict=True):
            if answer.done() and (error := answer.exception()) is not None:
                raise BrokenGroupError(f"{peer.name} failed while receiving: {error!r}") from error

    def _break_off(self, group: BroadcastGroup, buffers: Buffers, error: BaseException) -> None:
        """Tell the engines that no more buckets will come."""
        try:
            buffers.take()
            buffers.start(BROKE_OFF)
            buffers.wait_all()
        except BrokenGroupError as other:
            error.add_note(f"the engines could not be told: {other}")
        finally:
            group.close()


class BroadcastGroup:
    """A group in which rank 0 sends."""

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        self.device, self.timeout_s = device, timeout_s
        self._store = store
        timeout = timedelta(seconds=timeout_s)
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            torch.cuda.set_device(torch.cuda.current_device() if device.index is None else device)
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, timeout)

    def broadcast(self, content: Tensor) -> dist.Work:
        """Start to send from rank 0, or to receive."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return self._group.broadcast([content], options)

    def wait(self, work: dist.Work, check: Callable[[], None]) -> None:
        """Until a bucket has arrived everywhere it goes next; `check` raises if that will never be.

        Raises:
            WeightError: the other side is gone or takes too long.
        """
        deadline = time.monotonic() + self.timeout_s
        while not work.is_completed():
            check()
            if time.monotonic() > deadline:
                raise BrokenGroupError(f"a bucket of weights did not get through within {self.timeout_s:g} s")
            time.sleep(POLL_S)
        try:
            work.wait()
        except RuntimeError as error:
            raise BrokenGroupError(f"the broadcast of weights broke off: {error}") from error

    def close(self) -> None:
        """Close all connections; whoever waits on the other side gets an error."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()
            group.shutdown()
        self._store = None  # type: ignore[assignment]


class Buffers:
    """Buckets in flight, each in a buffer that is used again once its bucket has arrived.

    All buffers have the size of the largest bucket and a byte more.
    """

    def __init__(self, group: BroadcastGroup, buckets: list[Bucket], check: Callable[[], None]) -> None:
        size = 1 + max((bucket.num_bytes for bucket in buckets), default=0)
        self._group, self._check = group, check
        self._free = [torch.zeros(size, dtype=torch.uint8, device=group.device) for _ in range(NUM_BUFFERS)]
        self._flying: list[tuple[Tensor, dist.Work]] = []
        self._taken: Tensor | None = None

    @property
    def has_free(self) -> bool:
        """`take` need not wait."""
        return bool(self._free)

    def take(self) -> Tensor:
        """A buffer that is free, or becomes so; one that was taken and not started is given again."""
        if self._taken is None:
            if not self._free:
                self._free.append(self.wait_one())
            self._taken = self._free.pop()
        return self._taken

    def start(self, status: int) -> None:
        """Send, or receive into, the buffer taken last."""
        assert self._taken is not None
        self._taken[-1] = status
        self._flying.append((self._taken, self._group.broadcast(self._taken)))
        self._taken = None

    def wait_one(self) -> Tensor:
        """The buffer of the oldest bucket, which has arrived."""
        buffer, work = self._flying.pop(0)
        self._group.wait(work, self._check)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """The buffer of an arrived bucket is free again."""
        self._free.append(buffer)

    def wait_all(self) -> None:
        """Until nothing is in flight."""
        while self._flying:
            self._free.append(self.wait_one())


class GroupLink:
    """An engine's place in the group."""

    def __init__(self, group: BroadcastGroup, buckets: list[Bucket]) -> None:
        self.group, self.buckets = group, buckets

    def close(self) -> None:
        """See `Link.close`."""
        self.group.close()

    def receive(self, receiver: WeightReceiver) -> None:
        """Take all buckets, unpacking one while the next travels.

        Raises:
            WeightError: the trainer broke off.
        """
        buffers = Buffers(self.group, self.buckets, lambda: None)
        num_started = 0
        for bucket in self.buckets:
            while num_started < len(self.buckets) and buffers.has_free:
                buffers.take()
                buffers.start(GOES_ON)
                num_started += 1
            content = buffers.wait_one()
            if int(content[-1]) != GOES_ON:
                raise WeightError("the trainer broke off in the middle of an update")
            receiver.writing()
            unpack(content, bucket, receiver.weights)
            buffers.give_back(content)


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """Become one of the receivers."""

    host: str
    port: int
    rank: int
    size: int
    specs: Specs
    bucket_bytes: int
    timeout_s: float

    def apply(self, receiver: WeightReceiver) -> None:
        """See `Message.apply`."""
        receiver.set_link(None)
        timeout = timedelta(seconds=self.timeout_s)
        store = dist.TCPStore(self.host, self.port, self.size, False, timeout)
        group = BroadcastGroup(store, self.rank, self.size, receiver.device, self.timeout_s)
        receiver.set_link(GroupLink(group, cut_buckets(self.specs, self.bucket_bytes)))


@dataclass(frozen=True, slots=True)
class ReceiveBuckets:
    """All weights come in now."""

    def apply(self, receiver: WeightReceiver) -> None:
        """See `Message.apply`."""
        link = receiver.link(GroupLink)
        try:
            link.receive(receiver)
        except BaseException:
            receiver.set_link(None)
            raise


def local_address() -> str:
    """An address of this machine that others can reach, if its name has one."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
