"""The ranks that train one model together, and the few things they tell each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from limes.algorithms.whitening import Moments, merge_moments
from limes.config.parallel import RankLayout, lay_out
from limes.config.trainer import TrainerConfig
from limes.training.parallel.collectives import all_gather

T = TypeVar("T")

MESH_NAMES = ("dp_replicate", "dp_shard", "cp", "tp")


class Ranks:
    """One rank's view of all of them. Alone, everything here gives back what it got.

    Ranks are numbered with `tp` running fastest, then `cp`, `dp_shard` and `dp_replicate`. Those that differ in `cp` or
    `tp` alone train on the same samples: what they compute of a sample is the same on each, so that sums, means and
    decisions run over the data-parallel ranks.

    Attributes:
        rank: 0 .. size - 1.
        layout: sizes.
        device: where this rank computes.
    """

    def __init__(self, rank: int, layout: RankLayout, device: torch.device, mesh: DeviceMesh | None) -> None:
        assert (mesh is None) == (layout.size == 1), "several ranks have a mesh"
        self.rank, self.layout, self.device = rank, layout, device
        self._mesh = mesh
        self._shard_mesh: DeviceMesh | None = None
        self._dp_group: dist.ProcessGroup | None = None
        self._replica_group: dist.ProcessGroup | None = None
        if mesh is not None:
            inner = layout.cp * layout.tp
            per_replica = layout.dp_shard * inner
            self._dp_group = _subgroup([[k + i * inner for i in range(layout.dp)] for k in range(inner)])
            self._replica_group = _subgroup(
                [[k * per_replica + i for i in range(per_replica)] for k in range(layout.dp_replicate)]
            )

    @classmethod
    def alone(cls) -> Ranks:
        """The only rank."""
        return cls(0, RankLayout(), torch.device("cpu"), None)

    @classmethod
    def from_environment(cls, trainer: TrainerConfig, device: torch.device, *, timeout_s: float = 1800.0) -> Ranks:
        """Meet the other ranks where `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` say; alone without them.

        Args:
            trainer: says how so many ranks are laid out.

        Raises:
            ValueError: its settings do not divide them.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        layout = lay_out(size, trainer)
        if size == 1:
            return cls(0, layout, device, None)
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        return cls.join(int(os.environ["RANK"]), layout, address=address, device=device, timeout_s=timeout_s)

    @classmethod
    def join(
        cls, rank: int, layout: RankLayout, *, address: str, device: torch.device, timeout_s: float = 1800.0
    ) -> Ranks:
        """Meet the other ranks; every one of them makes this call.

        Args:
            address: `host:port` of rank 0, free there.
            device: of this rank; gloo connects CPUs, NCCL connects GPUs.
            timeout_s: how long a collective may wait for the others.
        """
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
            torch.cuda.set_device(device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            init_method=f"tcp://{address}",
            rank=rank,
            world_size=layout.size,
            timeout=timedelta(seconds=timeout_s),
        )
        return cls.of_group(rank, layout, device)

    @classmethod
    def of_group(cls, rank: int, layout: RankLayout, device: torch.device) -> Ranks:
        """The ranks of a default process group that is there already."""
        assert dist.get_world_size() == layout.size, f"{dist.get_world_size()} processes, {layout}"
        if layout.size == 1:
            return cls(rank, layout, device, None)
        sizes = (layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp)
        return cls(rank, layout, device, init_device_mesh(device.type, sizes, mesh_dim_names=MESH_NAMES))

    def leave(self) -> None:
        """Take the process group down."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def size(self) -> int:
        """All ranks."""
        return self.layout.size

    @property
    def is_alone(self) -> bool:
        """There is no other."""
        return self._mesh is None

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks along `MESH_NAMES`."""
        assert self._mesh is not None, "a single rank has no mesh"
        return self._mesh

    @property
    def shard_mesh(self) -> DeviceMesh:
        """Those that shard parameters: (copies of the model, ranks of one copy that hold the same slice of its heads).

        A context-parallel rank holds a part of the parameters like any other, and gradients of its tokens add up with
        those of the others' samples.
        """
        if self._shard_mesh is None:
            layout = self.layout
            sizes = (layout.dp_replicate, layout.dp_shard * layout.cp, layout.tp)
            whole = init_device_mesh(self.device.type, sizes, mesh_dim_names=("replicate", "shard", "tp"))
            self._shard_mesh = whole["replicate", "shard"] if layout.dp_replicate > 1 else whole["shard"]
        return self._shard_mesh

    @property
    def dp_rank(self) -> int:
        """Which shard of a rollout is this rank's."""
        return self.rank // (self.layout.cp * self.layout.tp)

    @property
    def dp_size(self) -> int:
        """Shards of a rollout."""
        return self.layout.dp

    @property
    def replica_rank(self) -> int:
        """Which copy of the model is this rank's."""
        return self.dp_rank // self.layout.dp_shard

    @property
    def shard_rank(self) -> int:
        """Place among the ranks that shard a copy."""
        return (self.rank // self.layout.tp) % (self.layout.dp_shard * self.layout.cp)

    @property
    def cp_rank(self) -> int:
        """Which tokens of a micro-batch are this rank's."""
        return (self.rank // self.layout.tp) % self.layout.cp

    @property
    def tp_rank(self) -> int:
        """Which heads are this rank's."""
        return self.rank % self.layout.tp

    @property
    def cp_group(self) -> dist.ProcessGroup:
        """Ranks that share the tokens of a micro-batch."""
        return self.mesh.get_group("cp")

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """Ranks that share the heads."""
        return self.mesh.get_group("tp")

    @property
    def replica_group(self) -> dist.ProcessGroup:
        """Ranks that hold one copy of the model together; in it they are ordered by (`shard_rank`, `tp_rank`)."""
        assert self._replica_group is not None
        return self._replica_group

    @property
    def is_first(self) -> bool:
        """This one writes files and speaks for all."""
        return self.rank == 0

    @property
    def speaks(self) -> bool:
        """This one answers for the samples of its data-parallel rank."""
        return self.cp_rank == 0 and self.tp_rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the data-parallel ranks, in float64 and the values' own type and place."""
        if self._dp_group is None:
            return values
        total = values.detach().to(self.device, torch.float64)
        dist.all_reduce(total, group=self._dp_group)
        return total.to(values.device, values.dtype)

    def sum_of_all(self, values: Tensor) -> Tensor:
        """The sum over every rank, in float64."""
        if self._mesh is None:
            return values
        total = values.detach().to(self.device, torch.float64)
        dist.all_reduce(total)
        return total

    def most(self, value: int) -> int:
        """The largest of all ranks' numbers."""
        if self._mesh is None:
            return value
        found = torch.tensor(value, dtype=torch.int64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return int(found)

    def any(self, flag: bool) -> bool:
        """Whether it holds on any rank."""
        return bool(self.most(int(flag)))

    def gather(self, value: T) -> list[T]:
        """What each data-parallel rank has, in their order; given to every rank."""
        if self._dp_group is None:
            return [value]
        found: list[Any] = [None] * self.dp_size
        dist.all_gather_object(found, value, group=self._dp_group)
        return found

    def merge_moments(self, moments: Moments) -> Moments:
        """Moments of the union of the data-parallel ranks' values."""
        if self._dp_group is None:
            return moments
        own, device = moments.pack().to(self.device), moments.count.device
        found = own.new_empty(self.dp_size * len(own))
        all_gather(found, own, self._dp_group)
        return merge_moments(Moments.unpack(part.to(device)) for part in found.split(len(own)))

    def from_first(self, value: T) -> T:
        """What rank 0 has."""
        if self._mesh is None:
            return value
        found = [value]
        dist.broadcast_object_list(found, src=0, device=self.device)
        return found[0]

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite a tensor on this rank's device with rank 0's; returns it."""
        if self._mesh is not None:
            dist.broadcast(tensor, src=0)
        return tensor

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self._mesh is not None:
            self.most(0)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A block that may fail on some ranks and then fails on all, so that none waits for one that is gone.

        Raises:
            ValueError: names the ranks that failed, and why.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            if self._mesh is None:
                raise
            error = caught
        if self._mesh is None:
            return
        found: list[str | None] = [None] * self.size
        dist.all_gather_object(found, None if error is None else str(error) or repr(error))
        faults = [f"rank {rank}: {text}" for rank, text in enumerate(found) if text is not None]
        if faults:
            raise ValueError(f"{what} failed on {len(faults)} of {self.size} ranks; {'; '.join(faults)}") from error


def _subgroup(members: list[list[int]]) -> dist.ProcessGroup:
    """This rank's of the groups, which are made by all ranks in the same order."""
    own, _ = dist.new_subgroups_by_enumeration(members)
    assert own is not None
    return own
