"""The roles of a run on Ray, each in the process of its place. What builds them runs there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from limes.cluster.compute import on_a_passing_thread
from limes.cluster.handles import CriticGroup, RolloutManagerHandle, TrainGroup
from limes.cluster.placement import Placement, Placements
from limes.cluster.ray_host import Surroundings
from limes.cluster.relay import Outbox, RelayConsole
from limes.cluster.remote_engine import EngineFacts, EngineRole, RemoteEngine
from limes.cluster.roles import build_critic, load_model, model_inside
from limes.cluster.train_role import EngineFeed, TrainRole
from limes.config import Config
from limes.config.parallel import lay_out
from limes.engine.pool import EnginePool
from limes.records import Sample
from limes.rollout import RolloutManager
from limes.run import Console
from limes.run.tracking import Tracking

if TYPE_CHECKING:
    from limes.cluster.ray_actor import RayActor


@dataclass(frozen=True, slots=True)
class TextSide:
    """What text and token ids have to do with each other; the weights are elsewhere."""

    tokenizer: Any
    end_token_ids: tuple[int, ...]
    max_context_len: int


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
        environments = rank_environments(processes)
        for rank, (process, environment) in enumerate(zip(processes, environments, strict=True)):
            process.build(factory, config, rank, list(manager.engines), environment=environment)
        groups.append(processes)
    actors, critics = groups
    manager.num_ranks = lay_out(len(actors), config.trainer).dp
    actor = TrainGroup(actors, tracking, tells_updates=True)
    return actor, CriticGroup(critics, tracking) if critics else None


def rank_environments(processes: Sequence[RayActor]) -> list[dict[str, str]]:
    """The variables by which torch.distributed finds the other ranks."""
    if len(processes) < 2:
        return [{} for _ in processes]
    host, port = processes[0].free_port()
    nodes = [process.info.node_id for process in processes if process.info is not None]
    one_node = {"GLOO_SOCKET_IFNAME": "lo"} if len(set(nodes)) == 1 else {}
    common = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(len(processes))} | one_node
    return [
        common | {"RANK": str(rank), "LOCAL_RANK": str(nodes[:rank].count(node))} for rank, node in enumerate(nodes)
    ]


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
    from limes.rollout import (
        Conversations,
        build_rollout_manager,
        build_sft_manager,
        load_all_prompts,
        load_conversations,
    )
    from limes.training.checkpoint import MODEL

    facts: list[EngineFacts] = await asyncio.gather(*(engine.call("facts") for engine in engines))
    folder = resolve_model(model_inside(config.model.path, MODEL), notice=around.console.notice)
    tokenizer = load_tokenizer(folder, config.model.chat_template)
    text = TextSide(tokenizer, facts[0].end_token_ids, facts[0].max_context_len)
    console, samples = around.console, around.rollouts
    supervised = config.algorithm.is_supervised
    data = load_conversations(config, text, console) if supervised else load_all_prompts(config, text, console, ks)
    await asyncio.gather(*(engine.call("start", data.longest) for engine in engines))
    pool = EnginePool([RemoteEngine(engine) for engine in engines])
    if isinstance(data, Conversations):

        async def score(samples: Sequence[Sample]) -> list[float]:
            return await engines[0].call("score", samples)

        return build_sft_manager(config, text, pool, data, score=score, samples_folder=samples, console=console)
    return build_rollout_manager(config, text, pool, data, samples_folder=samples, console=console)


async def build_trainer(around: Surroundings, config: Config, rank: int, engines: Sequence[RayActor]) -> TrainRole:
    """One rank of the trainer, on its own copy of the model; the first hands weights to the engines."""
    from limes.training.worker import TrainWorker

    policy = load_model(config.model, silent())
    feed = EngineFeed(config, policy, engines if rank == 0 else (), around.path / "weights")
    return TrainRole(TrainWorker(policy, config, engine=feed, samples_folder=around.rollouts), feed)


async def build_critic_role(around: Surroundings, config: Config, rank: int, engines: Sequence[RayActor]) -> Any:
    """One rank of the critic."""
    return build_critic(config, None, around.console if rank == 0 else silent())


def silent() -> Console:
    """A console that nobody hears."""
    return RelayConsole(Outbox())
