"""The trainer's side of an update, whatever the transport: stop the engines, hand over, let them go on.

    sender = build_sender(config.weights, folder=...)
    sender.connect(source, peers)            # once, and after engines were replaced
    report = sender.update(source, version)  # engines pause, take the weights, forget prefixes, go on
    sender.close()

A transport sends messages to the engines (`Peer.ask`); a message is carried out by the engine's `WeightReceiver`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from limes.weights.messages import Abandon, Begin, Checksums, CheckWeights, Describe, Finish
from limes.weights.names import Specs, WeightError, check_agreement
from limes.weights.receiver import CheckAction, EngineState
from limes.weights.source import WeightSource
from limes.weights.transport import Peer, Transport, ask_all


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """One update: bytes to each engine, all of its seconds, and those in which engines stood still."""

    kind: str
    version: int
    num_weights: int
    num_bytes: int
    seconds: float
    paused_seconds: float
    limit_bytes_per_s: float | None = None
    density: float | None = None

    @property
    def limit_share(self) -> float | None:
        """Speed of the update as a share of the medium's."""
        return self.num_bytes / self.seconds / self.limit_bytes_per_s if self.limit_bytes_per_s else None

    def metrics(self) -> dict[str, float]:
        """Metric values by name."""
        found = {
            "perf/update_weights_bytes": float(self.num_bytes),
            "perf/update_weights_time_s": self.seconds,
            "perf/update_weights_paused_s": self.paused_seconds,
            "perf/update_weights_limit_share": self.limit_share,
            "perf/update_weights_density": self.density,
        }
        return {name: value for name, value in found.items() if value is not None}


class WeightSender:
    """Hands the trainer's weights to engines. Not for use by two threads at a time.

    Args:
        transport: how.
        timeout_s: how long an engine may take to answer a message.

    Attributes:
        version: of the last update that succeeded; never falls.
    """

    def __init__(self, transport: Transport, *, timeout_s: float) -> None:
        self.transport, self.timeout_s = transport, timeout_s
        self.version = 0
        self._peers: tuple[Peer, ...] = ()
        self._specs: Specs = {}
        self._limit: float | None = None
        self._is_measured = False

    def connect(self, source: WeightSource, peers: Sequence[Peer]) -> None:
        """Make ready for updates to these engines, and to no others.

        Raises:
            WeightError: a weight that an engine does not take, or that the trainer does not send, by name; an engine
                with weights newer than the trainer's; or a transport that cannot reach an engine.
        """
        self._peers = ()
        specs = dict(source.specs)
        states: list[EngineState] = ask_all(peers, Describe(), self.timeout_s)
        for peer, state in zip(peers, states, strict=True):
            check_agreement(specs, state.specs, peer.name)
        self.transport.connect(specs, peers, states)
        self._peers, self._specs = tuple(peers), specs

    def update(self, source: WeightSource, version: int) -> UpdateReport:
        """Hand the weights over as `version`.

        After an error, engines whose weights were touched stand still until an update succeeds; the others go on with
        what they have.

        Raises:
            ValueError: the version falls.
            WeightError: no engine is connected, or one of them failed; names it.
        """
        if version < self.version:
            raise ValueError(f"weight version {version} is older than the last one handed over, {self.version}")
        if not self._peers:
            raise WeightError("no engine is connected")
        self._check_source(source)
        self._measure_once()
        started = time.perf_counter()
        self.transport.prepare(source, version)
        paused = time.perf_counter()
        try:
            ask_all(self._peers, Begin(version), self.timeout_s)
            sent = self.transport.send(source, version)
            ask_all(self._peers, Finish(version), self.timeout_s)
        except BaseException as error:
            self._abandon(error)
            raise
        self.version = version
        ended = time.perf_counter()
        return UpdateReport(
            kind=self.transport.kind,
            version=version,
            num_weights=len(self._specs),
            num_bytes=sent.num_bytes,
            seconds=ended - started,
            paused_seconds=ended - paused,
            limit_bytes_per_s=self._limit,
            density=sent.density,
        )

    def check_weights(self, action: CheckAction) -> dict[str, list[str]]:
        """See `WeightReceiver.check_weights`; names by engine, for engines that have any."""
        answers = ask_all(self._peers, CheckWeights(action), self.timeout_s)
        return {peer.name: names for peer, names in zip(self._peers, answers, strict=True) if names}

    def checksums(self) -> dict[str, dict[str, int]]:
        """Checksum of each weight, by engine."""
        answers = ask_all(self._peers, Checksums(), self.timeout_s)
        return {peer.name: sums for peer, sums in zip(self._peers, answers, strict=True)}

    def close(self) -> None:
        """Leave nothing behind; engines keep their weights."""
        self._peers = ()
        self.transport.close()

    def _check_source(self, source: WeightSource) -> None:
        specs = source.specs
        if dict(specs) != self._specs or list(specs) != list(self._specs):
            check_agreement(specs, self._specs, "the connected engines")
            raise WeightError("the trainer's weights have another order than when the engines were connected")

    def _measure_once(self) -> None:
        if not self._is_measured:
            self._limit, self._is_measured = self.transport.limit_bytes_per_s(), True

    def _abandon(self, error: BaseException) -> None:
        """Tell every engine; one that cannot be told is noted on the error."""
        for peer in self._peers:
            try:
                ask_all([peer], Abandon(), self.timeout_s)
            except Exception as other:  # noqa: BLE001 - the first error is the one that counts
                error.add_note(f"{peer.name} was not told that the update failed: {other}")
