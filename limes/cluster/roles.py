"""The roles of a run, built where they are placed."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from limes.cluster.compute import OnThread, on_a_passing_thread
from limes.cluster.handles import CriticGroup, RolloutManagerHandle, TrainGroup
from limes.cluster.local import LocalActor
from limes.cluster.memory import DeviceMemory, memory_plan
from limes.cluster.placement import Placement, Placements
from limes.cluster.resume import load_checkpoint
from limes.cluster.train_role import TrainRole
from limes.config import Config, batch_algebra
from limes.config.model import ModelConfig
from limes.records import Sample
from limes.rollout import (
    Conversations,
    Prompts,
    RolloutManager,
    build_rollout_manager,
    build_sft_manager,
    load_all_prompts,
    load_conversations,
)
from limes.rollout.sft import Score
from limes.run import Console
from limes.run.tracking import Tracking

if TYPE_CHECKING:
    from limes.engine.embedded.engine import EmbeddedEngine
    from limes.engine.protocol import Engine
    from limes.models.policy import Policy, TextModel
    from limes.training.critic import CriticWorker
    from limes.training.ranks import Ranks


async def create_rollout_manager(
    config: Config, placement: Placement, tracking: Tracking, *, ks: Sequence[int] | None = None
) -> tuple[RolloutManagerHandle, int | None]:
    """Load model, data and grader, and start the engines, which are offloaded where the plan says so.

    Returns:
        The manager and the rollouts of one epoch, None where nothing is trained.

    Raises:
        ValueError: something that the settings name cannot be had.
    """
    if placement.processes:
        from limes.cluster.ray_roles import start_manager

        manager = start_manager(config, placement, tracking, ks)
    else:
        actor = LocalActor("rollout", lambda: _build_manager(config, placement, tracking, ks))
        manager = RolloutManagerHandle(actor, tracking)
    try:
        await manager.ready()
        if config.weights.check_update_equal:
            await manager.check_weights("snapshot")
            await manager.check_weights("scramble")
        tags = memory_plan(config).rollout_tags
        if tags:
            await manager.offload(tags)
        num_prompts = await manager.num_prompts()
    except BaseException:
        await manager.dispose()
        raise
    return manager, None if num_prompts is None else batch_algebra(config, num_prompts).rollouts_per_epoch


async def create_training_models(
    config: Config, placements: Placements, manager: RolloutManagerHandle, tracking: Tracking
) -> tuple[TrainGroup, CriticGroup | None]:
    """Start the actor's train worker on the manager's model, and the critic's on one of its own where the algorithm has
    one; with `checkpoint.load`, all go on from there.

    Raises:
        ValueError: the checkpoint or the critic cannot be loaded, or the run it is of has nothing left to do.
    """
    if config.cluster.debug_rollout_only:
        return TrainGroup([], tracking), None
    if placements["actor"].processes:
        from limes.cluster.ray_roles import start_training

        actor, critic = start_training(config, placements, manager, tracking)
    else:
        actor, critic = _start_training(config, placements, tracking)
    try:
        await actor.ready()
        if critic is not None:
            await critic.ready()
        if config.checkpoint.load is not None:
            await load_checkpoint(config, actor, critic, manager)
        gc.freeze()  # what is loaded by now stays; walking it in every collection costs up to a second a step
    except BaseException:
        await asyncio.gather(*(group.dispose() for group in (actor, critic) if group is not None))
        raise
    return actor, critic


def _start_training(
    config: Config, placements: Placements, tracking: Tracking
) -> tuple[TrainGroup, CriticGroup | None]:
    worker = LocalActor("actor", lambda: _build_worker(config, placements["actor"], tracking))
    actor = TrainGroup([worker], tracking)
    if config.algorithm.advantage_estimator != "ppo":
        return actor, None
    second = LocalActor("critic", lambda: _build_critic(config, placements["critic"], tracking))
    return actor, CriticGroup([second], tracking)


async def _build_manager(
    config: Config, placement: Placement, tracking: Tracking, ks: Sequence[int] | None
) -> RolloutManager:
    console = tracking.console
    policy = await on_a_passing_thread(lambda: load_model(config.model, console))
    if config.cluster.debug_train_only:
        return _build_replay(config, placement, tracking, policy)
    await asyncio.sleep(0)  # a role that is ended meanwhile stops here
    data = load_data(config, policy, console, ks)
    await asyncio.sleep(0)
    engine = start_engine(config, policy, data.longest)
    folder = tracking.folder.rollouts
    try:
        score = answer_scorer(config, policy, engine)
        manager = manager_on(engine, config, policy, data, score=score, samples_folder=folder, console=console)
    except BaseException:
        await engine.close()
        raise
    placement.shared.policy, placement.shared.engine = policy, engine
    return manager


def load_data(config: Config, policy: TextModel, console: Console, ks: Sequence[int] | None) -> Prompts | Conversations:
    """What a run asks, or what it teaches.

    Raises:
        ValueError: it cannot be had.
    """
    if config.algorithm.is_supervised:
        return load_conversations(config, policy, console)
    return load_all_prompts(config, policy, console, ks)


def manager_on(
    engine: Engine,
    config: Config,
    policy: TextModel,
    data: Prompts | Conversations,
    *,
    score: Score,
    samples_folder: Path,
    console: Console,
) -> RolloutManager:
    """The rollout manager for such data; `score` is for conversations."""
    if isinstance(data, Conversations):
        return build_sft_manager(
            config, policy, engine, data, score=score, samples_folder=samples_folder, console=console
        )
    return build_rollout_manager(config, policy, engine, data, samples_folder=samples_folder, console=console)


def _build_replay(config: Config, placement: Placement, tracking: Tracking, policy: Policy) -> RolloutManager:
    from limes.rollout.replay import build_replay_manager

    engine = start_engine(config, policy, 1)  # for its thread
    placement.shared.policy, placement.shared.engine = policy, engine
    return build_replay_manager(config, engine, samples_folder=tracking.folder.rollouts, console=tracking.console)


def answer_scorer(config: Config, policy: Policy, engine: EmbeddedEngine) -> Score:
    """Log-probs of given answers under the policy as it is, computed as the trainer does."""
    from limes.training.forward import PackedForward

    trainer = config.trainer
    forward = PackedForward(
        policy, temperature=1.0, head_chunk=trainer.head_chunk, share_prefixes=trainer.share_prefixes
    )

    async def score(samples: Sequence[Sample]) -> list[float]:
        return await engine.run(lambda: forward.score(samples, trainer.max_tokens_per_micro_batch).tolist())

    return score


def load_model(config: ModelConfig, console: Console) -> Policy:
    """Load the policy and say what it is; a checkpoint folder stands for the model in it.

    Raises:
        ValueError: it cannot be had.
    """
    from limes.models.load import load_policy
    from limes.training.checkpoint import MODEL

    path = model_inside(config.path, MODEL)
    with console.phase("load model", detail=path):
        policy = load_policy(config.model_copy(update={"path": path}), notice=console.notice)
    console.notice(f"model: {path}, {describe_policy(policy)}")
    return policy


def model_inside(path: str, *places: str) -> str:
    """The first model folder at one of the `places` in a checkpoint folder; any other path as it is."""
    inner = (Path(path) / place for place in places)
    return next((str(folder) for folder in inner if (folder / "config.json").is_file()), path)


def describe_policy(policy: Policy) -> str:
    """Size, type and place of a model."""
    millions = sum(parameter.numel() for parameter in policy.model.parameters()) / 1e6
    kind = str(policy.dtype).removeprefix("torch.")
    return f"{millions:.4g} M parameters in {kind} on {policy.device}, context {policy.max_context_len} tokens"


def start_engine(config: Config, policy: Policy, longest_prompt: int) -> EmbeddedEngine:
    """The embedded engine on the policy's tensors."""
    from limes.engine.embedded.engine import EmbeddedEngine

    return EmbeddedEngine(
        policy,
        kv_cache_tokens=config.engine.kv_cache_tokens or default_kv_tokens(config, policy, longest_prompt),
        page_size=config.engine.page_size,
        max_running=config.engine.max_running,
        prefill_chunk=config.engine.prefill_chunk,
        max_context_len=config.engine.max_context_len,
    )


def default_kv_tokens(config: Config, policy: Policy, longest_prompt: int) -> int:
    """Room for one rollout, or one evaluation, at full length, within `engine.kv_cache_gb`; at least for one answer."""
    page, rollout = config.engine.page_size, config.rollout
    groups = rollout.over_sampling_batch_size or rollout.batch_size
    eval_prompts = config.eval.num_prompts or groups
    if config.algorithm.is_supervised:  # nothing is sampled but the answers that are shown
        groups = eval_prompts = max(1, config.run.num_shown_samples)
    most = max(
        kv_tokens(groups, rollout.n_samples_per_prompt, longest_prompt, rollout.max_response_len, config),
        kv_tokens(
            eval_prompts,
            config.eval.n_samples_per_prompt,
            longest_prompt,
            config.eval_sampling().max_response_len,
            config,
        ),
    )
    num_heads, head_dim = policy.kv_shape
    bytes_a_token = 2 * policy.num_layers * num_heads * head_dim * policy.dtype.itemsize
    one_answer = longest_prompt + max(rollout.max_response_len, config.eval_sampling().max_response_len) + 2 * page
    return max(one_answer, min(most, int(config.engine.kv_cache_gb * 1e9 / bytes_a_token)))


def kv_tokens(num_prompts: int, num_answers: int, prompt_len: int, response_len: int, config: Config) -> int:
    """KV tokens of answers at full length that share their prompts, `engine.max_running` of them at a time."""
    page = config.engine.page_size
    running = min(num_prompts * num_answers, config.engine.max_running)
    prompts = min(num_prompts, running)
    # the last page of a prompt and of an answer may be all but empty
    return prompts * (prompt_len + page) + running * (response_len + page)


async def _build_worker(config: Config, placement: Placement, tracking: Tracking) -> OnThread:
    from limes.training.worker import TrainWorker

    policy, engine = placement.shared.policy, placement.shared.engine
    assert policy is not None, "the rollout manager is built first"
    assert engine is not None
    folder = tracking.folder.rollouts
    worker = await engine.run(lambda: TrainWorker(policy, config, engine=engine, samples_folder=folder))
    memory = DeviceMemory("actor", worker.optimizer, tracking.folder.path, shares_weights=True)
    return OnThread(TrainRole(worker, memory, config), engine)


async def _build_critic(config: Config, placement: Placement, tracking: Tracking) -> OnThread:
    policy, engine = placement.shared.policy, placement.shared.engine
    assert engine is not None, "the rollout manager is built first"
    assert policy is not None
    worker = await engine.run(lambda: build_critic(config, policy.folder, tracking.console))
    memory = DeviceMemory("critic", worker.optimizer, tracking.folder.path, shares_weights=False)
    return OnThread(TrainRole(worker, memory, config), engine)


def build_critic(config: Config, folder: Path | None, console: Console, ranks: Ranks | None = None) -> CriticWorker:
    """The critic's worker.

    Args:
        folder: of the policy, which the critic starts from unless the settings say otherwise.
        ranks: those that it is spread over, if there are several.
    """
    from limes.models.source import resolve_model
    from limes.training.checkpoint import CRITIC, MODEL
    from limes.training.critic import CriticWorker
    from limes.training.parallel.build import load_value_model_on
    from limes.training.ranks import Ranks

    path = config.critic.path
    if path is not None:
        path = model_inside(path, f"{CRITIC}/{MODEL}", MODEL)
    else:
        path = str(folder or resolve_model(model_inside(config.model.path, MODEL), notice=console.notice))
    with console.phase("load critic", detail=path):
        model = load_value_model_on(ranks or Ranks.alone(), config.model, path, notice=console.notice)
    return CriticWorker(model, config)
