"""What every driver needs around its loop: roles that are ended whatever happens, reports, exit codes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

from limes.checkpoints import remove_unfinished
from limes.cluster.handles import RolloutManagerHandle
from limes.cluster.local import RoleEnded
from limes.cluster.placement import Placements
from limes.config import Config, Resolved
from limes.config.counting import num_of
from limes.engine.protocol import EngineError
from limes.rollout import NoGroupsLeft
from limes.run import Console
from limes.run.tracking import Tracking, init_tracking
from limes.weights.names import WeightError

DONE, FAILED, INTERRUPTED = 0, 1, 130


class Disposable(Protocol):
    """A role's handle."""

    async def dispose(self) -> None:
        """End the role."""


class Roles:
    """The roles of a run, to be ended together, and then their places."""

    def __init__(self, tracking: Tracking, placements: Placements) -> None:
        self._tracking, self._placements = tracking, placements
        self._roles: list[Disposable] = []

    def add(self, *roles: Disposable | None) -> None:
        """End these roles too; None is a role that this run does not have."""
        self._roles.extend(role for role in roles if role is not None)

    async def dispose(self) -> None:
        """End all roles; a fault of one is told and keeps no other from ending. Nothing half-written stays behind."""
        outcomes = await asyncio.gather(*(role.dispose() for role in self._roles), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                notes = " ".join(getattr(outcome, "__notes__", ()))
                self._tracking.console.warn(f"while ending the run: {outcome!r} {notes}".rstrip())
        await asyncio.to_thread(self._placements.close)
        remove_unfinished(self._tracking.folder.checkpoints)


def with_num_rollout(config: Config, num_rollout_per_epoch: int | None, tracking: Tracking) -> tuple[Config, int]:
    """The settings with the number of rollouts filled in, and that number."""
    rollout = config.rollout
    num_rollout = rollout.num_rollout
    if num_rollout is None:
        assert rollout.num_epoch is not None, "checked with the settings"
        assert num_rollout_per_epoch is not None
        num_rollout = rollout.num_epoch * num_rollout_per_epoch
    tracking.num_rollout = num_rollout
    if num_rollout:
        epoch = "" if num_rollout_per_epoch is None else f", {num_of(num_rollout_per_epoch, 'rollout')} an epoch"
        samples = num_of(rollout.batch_size * rollout.n_samples_per_prompt, "sample")
        steps = num_of(config.trainer.num_steps_per_rollout, "optimizer step")
        work = (
            f"{num_of(rollout.batch_size, 'conversation')} in {steps}"
            if config.algorithm.is_supervised
            else f"{num_of(rollout.batch_size, 'prompt')} x {num_of(rollout.n_samples_per_prompt, 'answer')} "
            f"({samples} in {steps})"
        )
        tracking.console.notice(f"plan: {num_of(num_rollout, 'rollout')} of {work}{epoch}")
        alone = config.critic.num_critic_only_steps
        if rollout.num_rollout is None and alone >= num_rollout:
            tracking.console.warn(
                f"critic.num_critic_only_steps = {alone} leaves the policy none of the "
                f"{num_of(num_rollout, 'rollout')} of rollout.num_epoch = {rollout.num_epoch}; "
                f"lower it to {num_rollout - 1} or less"
            )
    settled = rollout.model_copy(update={"num_rollout": num_rollout})
    return config.model_copy(update={"rollout": settled}), num_rollout


async def show_samples(manager: RolloutManagerHandle, config: Config, tracking: Tracking, when: str) -> None:
    """Show some answers to fixed prompts, `before training` or `after training`."""
    if config.rollout.num_rollout and config.run.num_shown_samples:
        tracking.show(f"answers {when}", await manager.show_samples(config.run.num_shown_samples))


def run_to_the_end(
    main: Callable[[Config, Tracking], Coroutine[Any, Any, None]], resolved: Resolved, *, default_name: str
) -> int:
    """Run a driver with its folder and reports; returns the exit code.

    Ctrl-C ends it from any phase with one line and 130. A run that fails while it runs says why in one line and gives
    1; a fault of the settings stays a `ValueError`.
    """
    config = resolved.config
    prepare_process(config)
    with Console() as console:
        tracking = init_tracking(config, resolved.recipe.stem if resolved.recipe else default_name, console)
        outcome = "failed"
        try:
            run_coroutine(main(config, tracking))
            outcome, code = "done", DONE
        except KeyboardInterrupt:
            outcome, code = "interrupted", INTERRUPTED
        except (EngineError, NoGroupsLeft, RoleEnded, WeightError) as error:
            outcome, code = f"failed: {error}", FAILED
        except ValueError:
            outcome = "refused"  # its message is for the user and comes from whoever catches it
            raise
        finally:
            tracking.finish(outcome)
    return code


def run_coroutine(work: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run`, also where an event loop runs already, as in a notebook: there on a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[None] | None]] = Future()

    async def noted() -> None:
        started.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        await work

    with ThreadPoolExecutor(1, thread_name_prefix="driver") as pool:
        done = pool.submit(asyncio.run, noted())
        try:
            done.result()
        except KeyboardInterrupt:
            loop, task = started.result()
            if task is not None and not done.done():
                loop.call_soon_threadsafe(task.cancel)
                wait([done])
            raise


def prepare_process(config: Config) -> None:
    """Set torch's CPU threads for every role of this process, and keep library progress bars out of our own."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    if config.cluster.num_threads:
        torch.set_num_threads(config.cluster.num_threads)
