"""Where the weights of an update come from: names and shapes beforehand, then one whole tensor after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from limes.weights.names import Specs, TensorSpec, WeightError, named_weights, specs_of


class WeightSource(Protocol):
    """The trainer's weights.

    A trainer of several ranks makes one on each of them; `tensors` gathers there, so that every rank has to go through
    it: the rank that sends by `WeightSender.update`, the others by `drain`.
    """

    @property
    def specs(self) -> Specs:
        """Name, shape and type of each weight, in the order of `tensors`; a tied weight once."""
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The whole tensors. Whoever reads them holds at most one bucket of them at a time."""
        ...


class ModuleSource:
    """The weights of a module that is whole in this process, or of a state dict.

    Args:
        model: read anew in every update; its tensors are not copied.
        dtype: type that floating-point weights are sent as; None sends them as they are.
    """

    def __init__(self, model: nn.Module | Mapping[str, Tensor], *, dtype: torch.dtype | None = None) -> None:
        self._model, self._dtype = model, dtype

    @property
    def specs(self) -> Specs:
        """See `WeightSource.specs`."""
        found = specs_of(named_weights(self._model))
        return {name: TensorSpec(spec.shape, self._sent_as(spec.dtype)) for name, spec in found.items()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `WeightSource.tensors`."""
        for name, tensor in named_weights(self._model).items():
            yield name, tensor.detach().to(self._sent_as(tensor.dtype))

    def _sent_as(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype


def checked_tensors(source: WeightSource, specs: Specs) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a source, which must be exactly the announced ones, in their order.

    Raises:
        WeightError: names the first tensor that is not as announced.
    """
    announced = iter(specs.items())
    for name, tensor in source.tensors():
        expected, spec = next(announced, (None, None))
        if name != expected:
            raise WeightError(f"the trainer sends {name} where it announced {expected or 'the end'}")
        if TensorSpec.of(tensor) != spec:
            raise WeightError(f"the trainer sends {name} as {TensorSpec.of(tensor)}, but announced {spec}")
        yield name, tensor
    for name, _ in announced:
        raise WeightError(f"the trainer announced {name}, but did not send it")


def drain(source: WeightSource) -> None:
    """Take part in an update that another rank sends: gather everything, and keep nothing."""
    for _ in source.tensors():
        pass
