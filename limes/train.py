"""The synchronous loop: generate, train, update weights, repeat."""

from __future__ import annotations

from collections.abc import Sequence

from limes.checkpoints import save_checkpoint
from limes.cluster.handles import RolloutManagerHandle, TrainGroup
from limes.cluster.memory import MemoryPlan, memory_plan
from limes.cluster.placement import create_placement_groups
from limes.cluster.resume import refuse_unusable_checkpoint
from limes.cluster.roles import create_rollout_manager, create_training_models
from limes.config import Config, Resolved
from limes.driver import Roles, run_to_the_end, show_samples, with_num_rollout
from limes.periodic import owes_evaluation, should_run_periodic_action
from limes.run.tracking import Tracking


async def train(config: Config, tracking: Tracking) -> None:
    """Train the model of `config`, or evaluate it when `rollout.num_rollout` is 0."""
    refuse_unusable_checkpoint(config)
    plan = memory_plan(config)
    placements = create_placement_groups(config, tracking)
    roles = Roles(tracking, placements)
    try:
        # first: it knows how many prompts there are, and so how long the run is
        manager, num_rollout_per_epoch = await create_rollout_manager(config, placements["rollout"], tracking)
        roles.add(manager)
        config, num_rollout = with_num_rollout(config, num_rollout_per_epoch, tracking)

        actor, critic = await create_training_models(config, placements, manager, tracking)
        roles.add(actor, critic)

        # always before anything is generated: the trainer's weights may be those of a checkpoint
        await hand_over(actor, manager, plan, check=config.weights.check_update_equal)

        if num_rollout == 0 or owes_evaluation(config, actor.start_rollout_id, num_rollout_per_epoch):
            await manager.eval(actor.start_rollout_id if num_rollout else 0)

        await show_samples(manager, config, tracking, "before training")

        for rollout_id in range(actor.start_rollout_id, num_rollout):
            if rollout_id == 0 and config.eval.interval is not None and not config.eval.skip_before_train:
                await manager.eval(rollout_id)

            tracking.step_begins(rollout_id)
            shards = await manager.generate(rollout_id)

            if plan.offload_rollout:
                await manager.offload(plan.rollout_tags)

            critic_only = rollout_id < config.critic.num_critic_only_steps
            if critic is None:
                await actor.train(rollout_id, shards)
            else:
                # what a call needs of the one before goes from role to role; nobody waits for it here
                kl = actor.submit_kl(rollout_id, shards) if config.algorithm.kl_coef else None
                values = critic.submit_train(rollout_id, shards, external_data=kl)
                if not critic_only:
                    await actor.train(rollout_id, shards, external_data=values)
                await critic.finish_train(rollout_id, values)

            is_last = rollout_id == num_rollout - 1
            if is_last or should_run_periodic_action(
                rollout_id, config.checkpoint.save_interval, num_rollout_per_epoch
            ):
                models = [critic] if critic_only else [actor, critic]
                folder, notice = tracking.folder.checkpoints, tracking.console.notice
                await save_checkpoint(models, manager, rollout_id, folder, force_sync=is_last, notice=notice)

            if critic is None or not config.cluster.colocate_critic:  # or each has made room for the other by itself
                await make_room([critic] if critic_only else [critic, actor], actor, plan)

            # engines that gave up memory get new weights in any case: graphs are captured anew on what is there
            if not critic_only or plan.offload_rollout:
                await hand_over(actor, manager, plan)
            tracking.step_ends(rollout_id)

            # an evaluation is named after the rollout that its weights would sample
            if not critic_only and should_run_periodic_action(rollout_id, config.eval.interval, num_rollout_per_epoch):
                await manager.eval(rollout_id + 1)

        await show_samples(manager, config, tracking, "after training")
    finally:
        await roles.dispose()


async def make_room(trained: Sequence[TrainGroup | None], actor: TrainGroup, plan: MemoryPlan) -> None:
    """Let the trainers leave the device to the engines, or at least give back what they do not use."""
    if not plan.offload_train:
        return await actor.clear_memory()
    for group in trained:
        if group is not None:
            await group.offload()


async def hand_over(actor: TrainGroup, manager: RolloutManagerHandle, plan: MemoryPlan, *, check: bool = False) -> None:
    """Give the engines the trainer's weights. KV cache and graphs come last: they need the room that the hand-over
    used, and the new weights in place."""
    if plan.offload_rollout:
        await manager.onload_weights()
    await actor.update_weights()
    if check:
        await manager.check_weights("compare")
    if plan.offload_rollout:
        await manager.onload_kv()


def run_train(resolved: Resolved) -> int:
    """Run `train` with its folder and reports; returns the exit code."""
    return run_to_the_end(train, resolved, default_name="train")
