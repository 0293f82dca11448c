"""The engine's side of an update: its own weights, changed in place by messages of the sender."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from limes.weights.checksum import checksum
from limes.weights.names import Specs, WeightError, as_bytes, named_weights, specs_of

if TYPE_CHECKING:
    from limes.weights.messages import Message

CheckAction = Literal["snapshot", "scramble", "compare"]
NOISE_SEED = 20


class Link(Protocol):
    """What a transport keeps on the engine's side between updates."""

    def close(self) -> None:
        """Let go of it."""
        ...


@dataclass(frozen=True, slots=True)
class EngineState:
    """What an engine says about its weights. `intact` is False while they are partly of an update that did not end."""

    specs: Specs
    version: int
    intact: bool
    device: str
    gpu_id: str | None
    process_id: int
    addresses: Mapping[str, int]


class WeightReceiver:
    """Takes updates into a module.

    Args:
        model: its weights are changed in place. A mapping must hold the engine's own tensors, not detached ones.
        own_weights: False where the tensors are the trainer's; then nothing here writes to them.

    Attributes:
        weights: by name of the state dict, a tied weight under its first name.
        version: of the last whole update; never falls.
        intact: the weights are those of `version`, all of them.
    """

    def __init__(self, model: nn.Module | Mapping[str, Tensor], *, own_weights: bool = True) -> None:
        self.weights = named_weights(model)
        self.specs = specs_of(self.weights)
        self.own_weights = own_weights
        self.version = 0
        self.intact = True
        self._begun: int | None = None
        self._link: Link | None = None
        self._snapshot: dict[str, Tensor] | None = None

    def handle(self, message: Message) -> Any:
        """Carry out one message of the sender; no two at a time."""
        return message.apply(self)

    def state(self) -> EngineState:
        """See `EngineState`."""
        gpu = gpu_id(self.device.index) if self.device.type == "cuda" else None
        addresses = self.addresses()
        return EngineState(self.specs, self.version, self.intact, str(self.device), gpu, os.getpid(), addresses)

    def addresses(self) -> dict[str, int]:
        """Where each weight is in its device's memory."""
        return {name: tensor.data_ptr() for name, tensor in self.weights.items()}

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(iter(self.weights.values())).device

    def begin(self, version: int) -> None:
        """An update starts; the engine has stopped sampling.

        Raises:
            WeightError: the version is older than that of the weights.
        """
        if version < self.version:
            raise WeightError(f"weight version {version} is older than the engine's {self.version}")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # nothing reads the weights any more
        self._begun = version

    def writing(self) -> None:
        """From here on the weights are neither the old nor the new ones.

        Raises:
            WeightError: no update has begun.
        """
        if self._begun is None:
            raise WeightError("weights came in outside of an update")
        assert self.own_weights, "shared weights are written by the trainer alone"
        self.intact = False

    def finish(self, version: int) -> None:
        """The update is whole.

        Raises:
            WeightError: it was not begun.
        """
        if self._begun != version:
            raise WeightError(f"weight version {version} ends, but the update that began is {self._begun}")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.version, self.intact, self._begun = version, True, None

    def abandon(self) -> bool:
        """The update will not end; returns whether the old weights are still whole."""
        self._begun = None
        return self.intact

    def check_weights(self, action: CheckAction) -> list[str]:
        """Whether updates reach every weight: `snapshot`, `scramble`, then an update of the same weights, `compare`.

        Returns:
            Names of the weights that `compare` finds different from the snapshot, bit for bit; else nothing.

        Raises:
            ValueError: unknown action, nothing to compare with, or weights that are the trainer's own.
        """
        if action not in get_args(CheckAction):
            raise ValueError(f"unknown action {action!r}; known are {get_args(CheckAction)}")
        if action == "snapshot":
            self._snapshot = {name: as_bytes(tensor).cpu().clone() for name, tensor in self.weights.items()}
        elif action == "scramble":
            if not self.own_weights:
                raise ValueError("cannot scramble weights that are the trainer's own")
            self._scramble()
        else:
            if self._snapshot is None:
                raise ValueError("nothing to compare with; take a snapshot first")
            kept, self._snapshot = self._snapshot, None
            return [name for name, old in kept.items() if not torch.equal(old, as_bytes(self.weights[name]).cpu())]
        return []

    def checksums(self) -> dict[str, int]:
        """Of each weight; equal bits give equal sums."""
        return {name: checksum(tensor) for name, tensor in self.weights.items()}

    def link(self, kind: type[Any]) -> Any:
        """What the transport keeps here.

        Raises:
            WeightError: the sender has not connected, or with another transport.
        """
        if not isinstance(self._link, kind):
            raise WeightError(f"the engine has no {kind.__name__}; connect before the update")
        return self._link

    def set_link(self, link: Link | None) -> None:
        """Replace what the transport keeps here."""
        if self._link is not None and self._link is not link:
            self._link.close()
        self._link = link

    def close(self) -> None:
        """Let go of everything that belongs to a transport; the weights stay."""
        self.set_link(None)
        self._snapshot = None

    def _scramble(self) -> None:
        """Turn all bits of each weight into noise."""
        self.intact = False
        for number, tensor in enumerate(self.weights.values()):
            generator = torch.Generator().manual_seed(NOISE_SEED + number)
            size = tensor.numel() * tensor.element_size()
            noise = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
            with torch.no_grad():
                tensor.copy_(noise.view(tensor.dtype).reshape(tensor.shape))


def gpu_id(index: int | None) -> str:
    """Names a GPU, whatever number this process sees it under."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index).uuid)
