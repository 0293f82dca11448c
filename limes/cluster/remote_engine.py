"""An engine in another process: the role it is there, and what stands for it here."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from limes.cluster.local import RoleEnded
from limes.cluster.memory import Residency, Vacated
from limes.config import Config
from limes.engine.protocol import EngineError, EngineHealth, GenerateRequest, GenerateResult, OnToken, PauseMode
from limes.records import Sample

if TYPE_CHECKING:
    from limes.cluster.ray_actor import RayActor
    from limes.models.policy import Policy
    from limes.weights.messages import Message


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the rollout manager has to know of the model that it never sees."""

    end_token_ids: tuple[int, ...]
    max_context_len: int
    vocab_size: int


class EngineRole:
    """An embedded engine on a copy of the model that is its own; the trainer's weights come in as messages."""

    def __init__(self, config: Config, policy: Policy) -> None:
        from limes.weights import WeightReceiver

        self.config, self.policy = config, policy
        self.receiver = WeightReceiver(policy.model)
        self._memory = Residency("engine", ("weights", "kv_cache", "cuda_graph"), on_top=["cuda_graph"])
        self._weights = Vacated(self.receiver.weights.values())

    def facts(self) -> EngineFacts:
        """See `EngineFacts`."""
        return EngineFacts(self.policy.end_token_ids, self.policy.max_context_len, self.policy.vocab_size)

    def start(self, longest_prompt: int) -> None:
        """Start to serve prompts of up to so many tokens."""
        from limes.cluster.roles import answer_scorer, start_engine
        from limes.weights import EngineWeights

        self.engine = start_engine(self.config, self.policy, longest_prompt)
        self.weights_of_engine = EngineWeights(self.engine, self.receiver, pause_mode=self.config.weights.pause_mode)
        self._score = answer_scorer(self.config, self.policy, self.engine)

    async def weights(self, message: Message) -> Any:
        """Carry out a message of the trainer.

        Raises:
            WeightError: an update begins while the weights are offloaded.
        """
        from limes.weights import WeightError
        from limes.weights.messages import Begin, Finish

        if isinstance(message, Begin) and "weights" not in self._memory.resident:
            raise WeightError("the weights are offloaded; onload them before an update")
        answer = await self.weights_of_engine.handle(message)
        if isinstance(message, Finish):
            self._memory.updated()
        return answer

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """Log-probs of given answers under the policy as it is, computed as the trainer does."""
        return await self._score(samples)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """See `Engine.generate`."""
        return await self.engine.generate(request)

    async def abort(self, request_ids: list[str] | None = None) -> None:
        """See `Engine.abort`."""
        await self.engine.abort(request_ids)

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`."""
        await self.engine.pause(mode)

    async def resume(self) -> None:
        """See `Engine.resume`."""
        await self.engine.resume()

    async def flush_cache(self) -> None:
        """See `Engine.flush_cache`."""
        await self.engine.flush_cache()

    async def offload(self, tags: list[str]) -> None:
        """See `Engine.offload`; weights are given back without a copy, as the next update brings them."""
        await self.engine.offload(tags)
        self._memory.offload(tags)
        if "weights" in tags:
            await self.engine.run(self._weights.release)

    async def onload(self, tags: list[str]) -> None:
        """See `Engine.onload`; weights have to be updated before graphs come back."""
        self._memory.onload(tags)
        if "weights" in tags:
            await self.engine.run(self._weights.take)
        await self.engine.onload(tags)

    async def weight_version(self) -> int:
        """See `Engine.weight_version`."""
        return await self.engine.weight_version()

    async def health(self) -> EngineHealth:
        """See `Engine.health`."""
        return await self.engine.health()

    async def close(self) -> None:
        """See `Engine.close`."""
        if hasattr(self, "engine"):
            await self.engine.close()
        self.receiver.close()


class RemoteEngine:
    """See `Engine`; stands for an `EngineRole`."""

    def __init__(self, actor: RayActor) -> None:
        self.actor = actor

    async def generate(self, request: GenerateRequest, on_token: OnToken | None = None) -> GenerateResult:
        """See `Engine.generate`; tokens are not streamed."""
        assert on_token is None, "an engine in another process does not stream"
        try:
            return await self._call("generate", request)
        except asyncio.CancelledError:
            await self._call("abort", [request.request_id])
            raise

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """See `Engine.abort`."""
        await self._call("abort", None if request_ids is None else list(request_ids))

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`."""
        await self._call("pause", mode)

    async def resume(self) -> None:
        """See `Engine.resume`."""
        await self._call("resume")

    async def flush_cache(self) -> None:
        """See `Engine.flush_cache`."""
        await self._call("flush_cache")

    async def offload(self, tags: Iterable[str]) -> None:
        """See `Engine.offload`."""
        await self._call("offload", list(tags))

    async def onload(self, tags: Iterable[str]) -> None:
        """See `Engine.onload`."""
        await self._call("onload", list(tags))

    async def weight_version(self) -> int:
        """See `Engine.weight_version`."""
        return await self._call("weight_version")

    async def health(self) -> EngineHealth:
        """See `Engine.health`; one whose process is gone is dead."""
        try:
            return await self._call("health")
        except EngineError as error:
            return EngineHealth(False, False, 0, 0, 0, 0, frozenset(), 0, str(error))

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._call("close")

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            return await self.actor.call(method, *args)
        except RoleEnded as error:
            raise EngineError(str(error)) from error


class RayPeer:
    """The trainer's way to an engine, see `limes.weights.transport.Peer`."""

    def __init__(self, actor: RayActor) -> None:
        self.name, self._actor = actor.name, actor

    def ask(self, message: Message) -> Future[Any]:
        """See `Peer.ask`."""
        return self._actor.call_for_future("weights", message)
