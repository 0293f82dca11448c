"""What every driver needs around its loop: roles that are ended whatever happens, reports, exit codes."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Protocol

from limes.checkpoints import remove_unfinished
from limes.cluster.handles import RolloutManagerHandle
from limes.cluster.local import RoleEnded
from limes.config import Config, Resolved
from limes.engine.protocol import EngineError
from limes.rollout import NoGroupsLeft
from limes.run import Console
from limes.run.tracking import Tracking, init_tracking

DONE, FAILED, INTERRUPTED = 0, 1, 130


class Disposable(Protocol):
    """A role's handle."""

    async def dispose(self) -> None:
        """End the role."""


class Roles:
    """The roles of a run, to be ended together."""

    def __init__(self, tracking: Tracking) -> None:
        self._tracking = tracking
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
        samples, steps = rollout.batch_size * rollout.n_samples_per_prompt, config.trainer.num_steps_per_rollout
        tracking.console.notice(
            f"plan: {num_rollout} rollouts of {rollout.batch_size} prompts x {rollout.n_samples_per_prompt} answers "
            f"({samples} samples in {steps} optimizer steps), {num_rollout_per_epoch} rollouts an epoch"
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
    threads_before = threading.enumerate()
    with Console() as console:
        tracking = init_tracking(config, resolved.recipe.stem if resolved.recipe else default_name, console)
        outcome = "failed"
        try:
            asyncio.run(main(config, tracking))
            outcome, code = "done", DONE
        except KeyboardInterrupt:
            outcome, code = "interrupted", INTERRUPTED
        except (EngineError, NoGroupsLeft, RoleEnded) as error:
            outcome, code = f"failed: {error}", FAILED
        except ValueError:
            outcome = "refused"  # its message is for the user and comes from whoever catches it
            raise
        finally:
            tracking.finish(outcome)
    leave_busy_threads_behind(code, threads_before)
    return code


def prepare_process(config: Config) -> None:
    """Set torch's CPU threads for every role of this process, and keep library progress bars out of our own."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    if config.cluster.num_threads:
        torch.set_num_threads(config.cluster.num_threads)


def leave_busy_threads_behind(code: int, threads_before: Collection[threading.Thread]) -> None:
    """End the process at once where a role would not end: the interpreter's own end could wait for it or crash.

    Args:
        threads_before: threads that were there before the roles; they are others' business.
    """
    new = [thread for thread in threading.enumerate() if thread not in threads_before]
    if any(thread.name.startswith("limes-") for thread in new):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
