"""The synchronous loop: generate, train, update weights, repeat."""

from __future__ import annotations

from limes.checkpoints import save_checkpoint
from limes.cluster.placement import create_placement_groups
from limes.cluster.resume import refuse_unusable_checkpoint
from limes.cluster.roles import OFFLOAD_TAGS, create_rollout_manager, create_training_models
from limes.config import Config, Resolved
from limes.driver import Roles, run_to_the_end, show_samples, with_num_rollout
from limes.periodic import should_run_periodic_action
from limes.run.tracking import Tracking


async def train(config: Config, tracking: Tracking) -> None:
    """Train the model of `config`, or evaluate it when `rollout.num_rollout` is 0."""
    refuse_unusable_checkpoint(config)
    placements = create_placement_groups(config)
    roles = Roles(tracking)
    try:
        # first: it knows how many prompts there are, and so how long the run is
        manager, num_rollout_per_epoch = await create_rollout_manager(config, placements["rollout"], tracking)
        roles.add(manager)
        config, num_rollout = with_num_rollout(config, num_rollout_per_epoch, tracking)

        actor, critic = await create_training_models(config, placements, manager, tracking)
        roles.add(actor, critic)

        # always before anything is generated: the trainer's weights may be those of a checkpoint
        await manager.onload_weights()
        await actor.update_weights()
        await manager.onload_kv()

        if num_rollout == 0:
            await manager.eval(0)

        await show_samples(manager, config, tracking, "before training")

        for rollout_id in range(actor.start_rollout_id, num_rollout):
            if rollout_id == 0 and config.eval.interval is not None and not config.eval.skip_before_train:
                await manager.eval(rollout_id)

            tracking.step_begins(rollout_id)
            shards = await manager.generate(rollout_id)
            await manager.offload(OFFLOAD_TAGS)

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

            await actor.clear_memory()
            if critic is not None:
                await critic.clear_memory()

            # KV cache and graphs come last: they need the room that training used, and the new weights in place
            await manager.onload_weights()
            if not critic_only:
                await actor.update_weights()
            await manager.onload_kv()
            tracking.step_ends(rollout_id)

            # an evaluation is named after the rollout that its weights would sample
            if not critic_only and should_run_periodic_action(rollout_id, config.eval.interval, num_rollout_per_epoch):
                await manager.eval(rollout_id + 1)

        await show_samples(manager, config, tracking, "after training")
    finally:
        await roles.dispose()


def run_train(resolved: Resolved) -> int:
    """Run `train` with its folder and reports; returns the exit code."""
    return run_to_the_end(train, resolved, default_name="train")
