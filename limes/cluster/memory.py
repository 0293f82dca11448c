"""Who lets go of device memory when, and what is allowed meanwhile."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from limes.config import Config

if TYPE_CHECKING:
    from torch import Tensor

TAGS = {"kv_cache": "kv_cache", "weight": "weights"}
"""Words of `cluster.offload_rollout_level` and the engine's tags."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What leaves the device in a step.

    Attributes:
        rollout_tags: what engines let go of while the trainer works; empty where they keep everything.
        offload_train: the trainer leaves while engines work.
    """

    rollout_tags: tuple[str, ...]
    offload_train: bool

    @property
    def offload_rollout(self) -> bool:
        """Engines let go of something."""
        return bool(self.rollout_tags)


def memory_plan(config: Config) -> MemoryPlan:
    """The plan by the settings under `cluster`."""
    from limes.models.load import pick_device

    cluster = config.cluster
    rollout = cluster.colocate if cluster.offload_rollout is None else cluster.offload_rollout
    tags = tuple(TAGS[level] for level in TAGS if level in cluster.offload_rollout_level)
    train = cluster.offload_train
    if train is None:
        train = cluster.kind == "ray" and cluster.colocate and pick_device(config.model.device).type == "cuda"
    return MemoryPlan(("cuda_graph", *tags) if rollout else (), train)


class Residency:
    """What one owner has on its device. Weights that come back are stale until they are written.

    Args:
        owner: word for it in errors.
        tags: what it has, in the order in which it may come back.
        on_top: tags that need everything else in place, weights that are not stale included.
    """

    def __init__(self, owner: str, tags: Iterable[str], *, on_top: Iterable[str] = ()) -> None:
        self.owner, self.tags, self._on_top = owner, tuple(tags), frozenset(on_top)
        self.resident = set(self.tags)
        self.is_stale = False

    def offload(self, tags: Iterable[str]) -> None:
        """Note that tags leave.

        Raises:
            ValueError: unknown, or gone already.
        """
        names = self._known(tags)
        if names - self.resident:
            raise ValueError(f"{self.owner}: {sorted(names - self.resident)} are offloaded already")
        self.resident -= names

    def onload(self, tags: Iterable[str]) -> None:
        """Note that tags come back.

        Raises:
            ValueError: unknown, there already, or before what they stand on.
        """
        names = self._known(tags)
        if names & self.resident:
            raise ValueError(f"{self.owner}: {sorted(names & self.resident)} are resident already")
        if names & self._on_top:
            missing = set(self.tags) - self.resident - names
            if missing:
                raise ValueError(
                    f"{self.owner}: cannot onload {sorted(names)} while {sorted(missing)} are offloaded; "
                    "onload those first"
                )
            if self.is_stale or "weights" in names:
                raise ValueError(
                    f"{self.owner}: cannot onload {sorted(names)} before the weights that came back were updated"
                )
        self.resident |= names
        self.is_stale |= "weights" in names

    def updated(self) -> None:
        """The weights were written."""
        self.require(["weights"], "update weights")
        self.is_stale = False

    def require(self, tags: Iterable[str], what: str) -> None:
        """Refuse to do `what` without tags.

        Raises:
            ValueError: one of them is offloaded.
        """
        missing = self._known(tags) - self.resident
        if missing:
            raise ValueError(f"{self.owner}: cannot {what} while {sorted(missing)} are offloaded; onload those first")

    def _known(self, tags: Iterable[str]) -> set[str]:
        names = set(tags)
        if names - set(self.tags):
            raise ValueError(f"{self.owner}: unknown memory tags {sorted(names - set(self.tags))}; has {self.tags}")
        return names


class Parking:
    """Takes tensors off their device and brings them back; they stay the same objects, and so do views of them.

    What was on a GPU waits in pinned memory, what was on a CPU in a file that has no name.

    Args:
        folder: for the file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parked: list[tuple[Tensor, Tensor | int, int]] = []
        self._file: IO[bytes] | None = None

    @property
    def is_empty(self) -> bool:
        """Nothing is parked."""
        return not self._parked

    def park(self, tensors: Iterable[Tensor]) -> int:
        """Keep the contents elsewhere and free the memory; returns the bytes that were freed."""
        assert self.is_empty, "parked already"
        total = 0
        for storage in self._storages(tensors):
            content = whole(storage)
            total += content.numel()
            self._parked.append((content, self._kept(content), content.numel()))
        if self._file is not None:
            self._file.flush()
        self._free()
        return total

    def restore(self, *, keep: bool = False) -> None:
        """Bring everything back. With `keep`, `release` can free it again as long as nobody has written to it."""
        for content, kept, size in self._parked:
            content.untyped_storage().resize_(size)
            if isinstance(kept, int):
                self._read(content, kept)
            else:
                content.copy_(kept, non_blocking=True)
        if not keep:
            self.forget()

    def release(self) -> None:
        """Free what `restore(keep=True)` brought back; its contents are still parked."""
        self._free()

    def forget(self) -> None:
        """Let go of what is kept."""
        self._parked = []
        if self._file is not None:
            self._file.close()
        self._file = None

    def _free(self) -> None:
        import torch

        if any(content.device.type == "cuda" for content, _, _ in self._parked):
            torch.cuda.synchronize()
        for content, _, _ in self._parked:
            content.untyped_storage().resize_(0)
        trim()

    def _storages(self, tensors: Iterable[Tensor]) -> list[Any]:
        """Each tensor's memory, once; made anew where it belongs to a file or another process."""
        from limes.training.parallel.sharding import local_of

        found: dict[int, Any] = {}
        for tensor in tensors:
            own = local_of(tensor.detach())
            if not own.untyped_storage().resizable():
                assert type(tensor.data) is type(own), "the parts of a spread tensor were made here"
                own = own.clone()
                tensor.data = own
            storage = own.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage
        return list(found.values())

    def _kept(self, content: Tensor) -> Tensor | int:
        import torch

        if content.device.type == "cuda":
            kept = torch.empty(content.shape, dtype=content.dtype, pin_memory=True)
            return kept.copy_(content, non_blocking=True)
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (lives until `forget`)
        place = self._file.tell()
        self._file.write(view_of(content))
        return place

    def _read(self, content: Tensor, place: int) -> None:
        assert self._file is not None
        self._file.seek(place)
        read = self._file.readinto(view_of(content))  # type: ignore[attr-defined]
        assert read == content.numel(), f"{read} of {content.numel()} bytes came back"


def trim() -> None:
    """Give freed memory of this process back to the system, where its C library can."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def view_of(content: Tensor) -> Any:
    """The bytes of a tensor on a CPU. (A tensor that numpy has seen cannot give its memory back.)"""
    return (ctypes.c_ubyte * content.numel()).from_address(content.data_ptr())


def whole(storage: Any) -> Tensor:
    """All bytes of a storage."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def optimizer_state(optimizer: Any) -> list[Tensor]:
    """What a `PolicyOptimizer` holds beside the parameters: moments, and masters that are not parameters."""
    own = {id(parameter) for parameter in optimizer.parameters}
    masters = [master for master in optimizer.masters if id(master) not in own]
    moments = [
        value
        for state in optimizer.adam.state.values()
        for value in state.values()
        if hasattr(value, "numel") and value.numel() > 1
    ]
    return [*masters, *moments]


class DeviceMemory:
    """A trainer's memory: its weights, unless an engine uses them too, and the rest.

    Args:
        owner: word for it in errors.
        optimizer: a `PolicyOptimizer`.
        shares_weights: an engine samples with the same tensors, so they stay.
        folder: for what leaves a CPU.
    """

    def __init__(self, owner: str, optimizer: Any, folder: Path, *, shares_weights: bool) -> None:
        self.owner, self._optimizer, self._shares = owner, optimizer, shares_weights
        self._weights, self._state = Parking(folder), Parking(folder)
        self.is_asleep = False

    def offload(self) -> int:
        """Leave the device; returns the bytes that were freed. One that has left stays away."""
        if self.is_asleep:
            return 0
        self.is_asleep = True
        for master in (*self._optimizer.masters, *self._optimizer.parameters):
            master.grad = None
        freed = self._state.park(optimizer_state(self._optimizer))
        return freed + (0 if self._shares else self._weights.park(self._optimizer.parameters))

    def onload(self) -> None:
        """Come back; one that is there stays."""
        if self.is_asleep:
            self._weights.restore()
            self._state.restore()
            self.is_asleep = False

    def lend_weights(self) -> None:
        """Bring the weights back to be read."""
        if self.is_asleep:
            self._weights.restore(keep=True)

    def take_weights(self) -> None:
        """Free weights that were lent."""
        if self.is_asleep:
            self._weights.release()

    def close(self) -> None:
        """Let go of what is parked."""
        self._weights.forget()
        self._state.forget()


class Vacated:
    """Tensors whose memory is given back and taken again, without their contents."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._shapes = [(tensor, tensor.shape) for tensor in tensors]

    def release(self) -> None:
        """Give the memory back."""
        for tensor, _ in self._shapes:
            tensor.data = tensor.data.new_empty(0)
        trim()

    def take(self) -> None:
        """Have memory again; what is in it is whatever was there."""
        for tensor, shape in self._shapes:
            tensor.data = tensor.data.new_empty(shape)
