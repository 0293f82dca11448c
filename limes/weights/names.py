"""Weights by name: those of the module's state dict, a tied weight once, and what must agree on both sides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

MAX_NAMES = 8


class WeightError(RuntimeError):
    """Weights could not be handed over; the message names the weight or the engine."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and type of a weight."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The spec of a tensor; of a sharded one, that of the whole."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        """Size without gaps."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


Specs = Mapping[str, TensorSpec]


def named_weights(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a module's state dict, themselves and not detached from it; a tied one under its first name.

    A mapping may stand in for the module. Two names are tied if they mean the same memory.
    """
    state = model.state_dict(keep_vars=True) if isinstance(model, nn.Module) else model
    found: dict[str, Tensor] = {}
    seen: set[object] = set()
    for name, tensor in state.items():
        place = place_of(tensor)
        if place not in seen:
            seen.add(place)
            found[name] = tensor
    return found


def place_of(tensor: Tensor) -> object:
    """Equal for two tensors exactly if they are views of the same memory with the same shape and type."""
    if type(tensor) not in (Tensor, nn.Parameter) or not tensor.numel() or tensor.is_meta:
        return id(tensor)  # a sharded tensor has no single place; a tied one is the same object
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def specs_of(weights: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """Spec by name, in order."""
    return {name: TensorSpec.of(tensor) for name, tensor in weights.items()}


def check_agreement(sent: Specs, taken: Specs, engine: str) -> None:
    """Both sides must mean the same tensors.

    Raises:
        WeightError: names weights that only one side has, or that differ in shape or type.
    """
    faults = []
    if nobody := [name for name in sent if name not in taken]:
        faults.append(f"sends weights that {engine} does not take: {_listed(nobody)}")
    if missing := [name for name in taken if name not in sent]:
        faults.append(f"sends nothing for weights of {engine}: {_listed(missing)}")
    if other := [name for name in sent if name in taken and sent[name] != taken[name]]:
        pairs = [f"{name} as {sent[name]}, where {engine} has {taken[name]}" for name in other]
        faults.append(f"sends {_listed(pairs)}")
    if faults:
        raise WeightError(f"the trainer {'; it '.join(faults)}")


def _listed(names: list[str]) -> str:
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, `[num_bytes]` uint8: a view if it is contiguous, else a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def writable_bytes(tensor: Tensor, name: str) -> Tensor:
    """The bytes of a tensor as a view that can be written to.

    Raises:
        WeightError: the tensor has gaps.
    """
    if not tensor.is_contiguous():
        raise WeightError(f"the engine's {name} is not contiguous, so that it cannot be written in pieces")
    return as_bytes(tensor)
