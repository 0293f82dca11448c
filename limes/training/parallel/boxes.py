"""Parts of tensors, as ranges along each dimension, and files of parts that any number of ranks can read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

PLACES = "places"
"""Entry of a file's metadata: for each tensor, the first index of its part along each dimension and the whole's shape.
"""


@dataclass(frozen=True, slots=True)
class Box:
    """Ranges along each dimension."""

    bounds: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes."""
        return tuple(end - start for start, end in self.bounds)

    @property
    def num(self) -> int:
        """Elements."""
        return prod(self.shape)

    def within(self, whole: Tensor) -> Tensor:
        """That part of a whole tensor, a view."""
        return whole[tuple(slice(start, end) for start, end in self.bounds)]

    def meet(self, other: Box) -> Box | None:
        """What both have; None for nothing."""
        pairs = zip(self.bounds, other.bounds, strict=True)
        bounds = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in pairs)
        return Box(bounds) if all(start < end for start, end in bounds) else None

    def relative_to(self, outer: Box) -> Box:
        """The same range, counted from where `outer` starts."""
        pairs = zip(self.bounds, outer.bounds, strict=True)
        return Box(tuple((start - base, end - base) for (start, end), (base, _) in pairs))


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a tensor, and the whole's shape."""

    tensor: Tensor
    box: Box
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> Part:
        """All of it."""
        return cls(tensor, Box(tuple((0, num) for num in tensor.shape)), tuple(tensor.shape))


def save_parts(path: Path, parts: Mapping[str, Part]) -> None:
    """Write parts of tensors into one safetensors file; empty ones are left out."""
    held = {name: part for name, part in parts.items() if part.box.num}
    places = {name: [[start for start, _ in part.box.bounds], list(part.shape)] for name, part in held.items()}
    tensors = {name: part.tensor.contiguous().cpu() for name, part in held.items()}
    save_file(tensors, path, metadata={PLACES: json.dumps(places)})


class PartsReader:
    """Tensors whose parts are spread over safetensors files; in a file without places, every tensor is whole.

    Use it in a `with` block.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files = ExitStack()
        self._parts: dict[str, list[tuple[Any, Box]]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            self._add(path)

    def __enter__(self) -> PartsReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def _add(self, path: Path) -> None:
        file = self._files.enter_context(safe_open(path, framework="pt"))
        places = json.loads((file.metadata() or {}).get(PLACES, "{}"))
        for name in file.keys():  # noqa: SIM118 - not a mapping
            shape = tuple(file.get_slice(name).get_shape())
            starts, whole = places.get(name, ([0] * len(shape), shape))
            box = Box(tuple((start, start + num) for start, num in zip(starts, shape, strict=True)))
            self._parts.setdefault(name, []).append((file, box))
            self.shapes[name] = tuple(whole)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A tensor, or the part of it that lies in a box.

        Raises:
            ValueError: the files lack some of it.
        """
        wanted = box or Box(tuple((0, num) for num in self.shapes[name]))
        found: Tensor | None = None
        num = 0
        for file, held in self._parts[name]:
            if not wanted.bounds:
                return file.get_tensor(name)
            common = wanted.meet(held)
            part = file.get_slice(name)
            if found is None:
                found = torch.empty(wanted.shape, dtype=_TYPES[part.get_dtype()])
            if common is not None:
                inside = common.relative_to(held)
                values = part[tuple(slice(start, end) for start, end in inside.bounds)]
                common.relative_to(wanted).within(found).copy_(values)
                num += common.num
        assert found is not None
        if num != wanted.num:
            raise ValueError(f"{name}: the files hold {num} of the {wanted.num} numbers at {list(wanted.bounds)}")
        return found


_TYPES = MappingProxyType(
    {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}
)
"""What safetensors calls them."""
