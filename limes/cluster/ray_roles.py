"""The roles of a run on Ray, each in the process of its place. What builds them runs there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from limes.cluster.compute import on_a_passing_thread
from limes.cluster.handles import CriticGroup, RolloutManagerHandle, TrainGroup
from limes.cluster.memory import DeviceMemory
from limes.cluster.placement import Placement, Placements
from limes.cluster.ray_host import Surroundings
from limes.cluster.relay import Outbox, RelayConsole
from limes.cluster.remote_engine import EngineFacts, EngineRole, RemoteEngine
from limes.cluster.roles import build_critic, load_data, load_model, manager_on, model_inside
from limes.cluster.train_role import EngineFeed, TrainRole
from limes.config import Config
from limes.config.parallel import lay_out
from limes.engine.pool import EnginePool
from limes.records import Sample
from limes.rollout import RolloutManager
from limes.rollout.replay import NoEngine, build_replay_manager
from limes.run import Console
from limes.run.tracking import Tracking
from limes.training.folders import MODEL

if TYPE_CHECKING:
    from limes.cluster.ray_actor import RayActor
    from limes.training.ranks import Ranks


@dataclass(frozen=True, slots=True)
class TextSide:
    """What text and token ids have to do with each other; the weights are elsewhere."""

    tokenizer: Any
    end_token_ids: tuple[int, ...]
    max_context_len: int
    vocab_size: int


def start_manager(
    config: Config, placement: Placement, tracking: Tracking, ks: Sequence[int] | None
) -> RolloutManagerHandle:
    """Start to build engines and manager; the manager waits for the engines."""
    manager, *engines = placement.processes
    for rank, engine in enumerate(engines):
        engine.build(build_engine, config, rank)
    manager.build(build_manager, config, engines, ks)
    return RolloutManagerHandle(manager, tracking, engines)


def start_training(
    config: Config, placements: Placements, manager: RolloutManagerHandle, tracking: Tracking
) -> tuple[TrainGroup, CriticGroup | None]:
    """Start to build the trainers, one for each rank."""
    groups = []
    for role, factory in (("actor", build_trainer), ("critic", build_critic_role)):
        processes = placements[role].processes
        for process, (meeting, environment) in zip(processes, meetings(processes), strict=True):
            process.build(factory, config, meeting, list(manager.engines), environment=environment)
        groups.append(processes)
    actors, critics = groups
    manager.num_ranks = lay_out(len(actors), config.trainer).dp
    actor = TrainGroup(actors, tracking, tells_updates=True)
    return actor, CriticGroup(critics, tracking, is_apart=not config.cluster.colocate_critic) if critics else None


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of a trainer find one another."""

    rank: int = 0
    size: int = 1
    address: str = ""

    def join(self, config: Config) -> Ranks:
        """Meet the others; all ranks make this call."""
        from limes.models.load import pick_device
        from limes.training.ranks import Ranks

        if self.size == 1:
            return Ranks.alone()
        device = pick_device(config.model.device)  # Ray shows each process its own GPU alone
        return Ranks.join(self.rank, lay_out(self.size, config.trainer), address=self.address, device=device)


def meetings(processes: Sequence[RayActor]) -> list[tuple[Meeting, dict[str, str]]]:
    """For each process, where it meets the others and the variables it needs for it."""
    if len(processes) < 2:
        return [(Meeting(), {}) for _ in processes]
    host, port = processes[0].free_port()
    nodes = [process.info.node_id for process in processes if process.info is not None]
    is_one_node = len(set(nodes)) == 1
    environment = {"GLOO_SOCKET_IFNAME": "lo"} if is_one_node else {}
    address = f"{'127.0.0.1' if is_one_node else host}:{port}"
    return [(Meeting(rank, len(nodes), address), environment) for rank in range(len(nodes))]


async def build_engine(around: Surroundings, config: Config, rank: int) -> EngineRole:
    """An engine on a copy of the model."""
    console = around.console if rank == 0 else silent()
    return EngineRole(config, await on_a_passing_thread(lambda: load_model(config.model, console)))


async def build_manager(
    around: Surroundings, config: Config, engines: Sequence[RayActor], ks: Sequence[int] | None
) -> RolloutManager:
    """The rollout manager on the engines."""
    from limes.models.source import resolve_model
    from limes.models.tokenizer import load_tokenizer

    if config.cluster.debug_train_only:
        return build_replay_manager(config, NoEngine(), samples_folder=around.rollouts, console=around.console)
    facts: list[EngineFacts] = await asyncio.gather(*(engine.call("facts") for engine in engines))
    folder = resolve_model(model_inside(config.model.path, MODEL), notice=around.console.notice)
    tokenizer = load_tokenizer(folder, config.model.chat_template)
    text = TextSide(tokenizer, facts[0].end_token_ids, facts[0].max_context_len, facts[0].vocab_size)
    console, samples = around.console, around.rollouts
    data = load_data(config, text, console, ks)
    await asyncio.gather(*(engine.call("start", data.longest) for engine in engines))
    pool = EnginePool([RemoteEngine(engine) for engine in engines])

    async def score(samples: Sequence[Sample]) -> list[float]:
        return await engines[0].call("score", samples)

    return manager_on(pool, config, text, data, score=score, samples_folder=samples, console=console)


async def build_trainer(around: Surroundings, config: Config, meeting: Meeting, engines: Sequence[RayActor]) -> Any:
    """One rank of the trainer, on its own copy or part of the model; the first hands weights to the engines."""
    from limes.training.parallel.build import load_policy_on
    from limes.training.worker import TrainWorker

    ranks = meeting.join(config)
    model = config.model.model_copy(update={"path": model_inside(config.model.path, MODEL)})
    policy = load_policy_on(ranks, model)
    feed = EngineFeed(config, policy, engines if meeting.rank == 0 else (), around.path / "weights")
    worker = TrainWorker(policy, config, engine=feed, samples_folder=around.rollouts)
    memory = DeviceMemory("actor", worker.optimizer, around.path / "weights", shares_weights=False)
    return TrainRole(worker, memory, config, feed)


async def build_critic_role(around: Surroundings, config: Config, meeting: Meeting, engines: Sequence[RayActor]) -> Any:
    """One rank of the critic."""
    ranks = meeting.join(config)
    worker = build_critic(config, None, around.console if meeting.rank == 0 else silent(), ranks)
    memory = DeviceMemory("critic", worker.optimizer, around.path / "weights", shares_weights=False)
    return TrainRole(worker, memory, config)


def silent() -> Console:
    """A console that nobody hears."""
    return RelayConsole(Outbox())
