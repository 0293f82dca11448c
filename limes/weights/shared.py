"""Hand-over where trainer and engine use the same tensors: no byte moves."""

from __future__ import annotations

import os
from collections.abc import Sequence

from limes.weights.names import Specs, WeightError
from limes.weights.receiver import EngineState
from limes.weights.source import WeightSource, checked_tensors
from limes.weights.transport import Peer, Sent


class SharedTransport:
    """Only makes sure that every engine's tensors are the trainer's own."""

    kind = "shared"

    def __init__(self) -> None:
        self._specs: Specs = {}
        self._states: dict[str, EngineState] = {}

    def connect(self, specs: Specs, peers: Sequence[Peer], states: Sequence[EngineState]) -> None:
        """See `Transport.connect`."""
        self._specs = specs
        self._states = {peer.name: state for peer, state in zip(peers, states, strict=True)}
        for name, state in self._states.items():
            if state.process_id != os.getpid():
                raise WeightError(f"weights.transport = shared, but {name} is another process; use ipc")

    def prepare(self, source: WeightSource, version: int) -> None:
        """See `Transport.prepare`."""

    def send(self, source: WeightSource, version: int) -> Sent:
        """See `Transport.send`.

        Raises:
            WeightError: a tensor is not the engine's own; names it.
        """
        for name, tensor in checked_tensors(source, self._specs):
            for engine, state in self._states.items():
                if tensor.data_ptr() != state.addresses[name]:
                    raise WeightError(f"{name} of {engine} is not the trainer's own tensor; connect again")
        return Sent(0)

    def limit_bytes_per_s(self) -> None:
        """See `Transport.limit_bytes_per_s`."""

    def close(self) -> None:
        """See `Transport.close`."""
        self._states = {}
