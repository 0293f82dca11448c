"""The process around a role on Ray. A `LocalActor` inside it keeps the order of calls and the role's own thread."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import os
import pickle
import socket
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from limes.cluster.local import LocalActor, RoleEnded
from limes.cluster.relay import Event, Outbox, RelayConsole
from limes.run import Console

CLOSE_S, JOIN_S = 5.0, 2.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a role has of the run.

    Attributes:
        console: shows on the driver's console.
        rollouts: folder of the samples of each rollout.
        path: the run folder.
    """

    console: Console
    rollouts: Path
    path: Path


Factory = Callable[..., Any]
"""Builds a role from its surroundings and picklable arguments; may be async."""


@dataclass(frozen=True, slots=True)
class HostSettings:
    """What a process takes over from the driver's.

    Attributes:
        imports: modules to load while the driver is still busy with others.
        num_threads: of torch.
        environment: variables to set.
    """

    run_folder: Path
    folder: str
    search_path: tuple[str, ...]
    num_threads: int
    imports: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HostInfo:
    """Where a role runs, for messages, placement and its log."""

    node_id: str
    host: str
    process_id: int
    log: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Stands for the value of a call that failed; a role that takes it as an argument fails in the same way."""

    error: BaseException


class RemoteTraceback(Exception):
    """Where an error came from in another process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class RoleFailed(RuntimeError):
    """A fault in a role that is no message for users; its cause holds the role's traceback."""


class RoleHost:
    """Runs one role. Meant to be an asynchronous Ray actor."""

    def __init__(self, name: str, settings: HostSettings) -> None:
        self._name, self._settings = name, settings
        if os.path.isdir(settings.folder):
            os.chdir(settings.folder)
        sys.path.extend(place for place in settings.search_path if place not in sys.path)
        import torch
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(settings.num_threads)
        for module in settings.imports:
            importlib.import_module(module)
        self._outbox = Outbox()
        self._actor: LocalActor | None = None
        self._turns: defaultdict[str, int] = defaultdict(int)
        self._waiting: dict[tuple[str, int], asyncio.Event] = {}

    async def describe(self) -> HostInfo:
        """Where this is."""
        import ray

        node_id = ray.get_runtime_context().get_node_id()
        try:
            log = os.readlink("/proc/self/fd/2")
        except OSError:
            log = ""
        return HostInfo(node_id, socket.gethostname(), os.getpid(), log)

    async def free_port(self) -> tuple[str, int]:
        """An address of this process for others to meet at."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    async def build(self, factory: Factory, args: Sequence[Any], environment: dict[str, str]) -> Failure | None:
        """Build the role; the failure, if it cannot be."""
        os.environ.update(environment)
        path = self._settings.run_folder
        around = Surroundings(RelayConsole(self._outbox), path / "rollouts", path)
        self._actor = LocalActor(self._name, lambda: factory(around, *args))
        try:
            await self._actor.ready()
        except Exception as error:  # noqa: BLE001 (handed to whoever asked)
            return Failure(portable(error, self._name, "start"))
        return None

    async def call(
        self, caller: str, number: int, parts: bool, method: str, names: Sequence[str], *values: Any
    ) -> tuple[Failure | None, Any]:
        """Call the role; a failure or None, and the value, as two objects.

        Args:
            caller, number: calls of one caller start in the order of their numbers.
            parts: the value is a list whose items stay in the cluster, one object each.
            names: of the last values, which are keyword arguments.
        """
        await self._turn(caller, number)
        assert self._actor is not None, "the role is built first"
        try:
            for value in values:
                if isinstance(value, Failure):
                    raise value.error
            num = len(values) - len(names)
            ref = self._actor.call(method, *values[:num], **dict(zip(names, values[num:], strict=True)))
        except Exception as error:  # noqa: BLE001 (delivered to the caller)
            failure = Failure(error)
            return failure, failure
        finally:
            self._next(caller, number)
        try:
            value = await ref
        except Exception as error:  # noqa: BLE001 (delivered to the caller)
            failure = Failure(portable(error, self._name, method))
            return failure, failure
        return None, _stored(value) if parts else value

    async def listen(self) -> list[Event]:
        """What the role has to say, once there is something."""
        return await self._outbox.fetch()

    async def close(self) -> list[Event]:
        """End the role, by its own `close` if it has one; the last of what it says. The process ends in any case, so a
        role in the middle of something long is not waited for."""
        actor = self._actor
        if actor is not None and actor.alive and hasattr(actor.role, "close"):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await actor.call("close")
        if actor is not None:
            await asyncio.to_thread(actor.close, JOIN_S)
        return self._outbox.take()

    async def _turn(self, caller: str, number: int) -> None:
        if self._turns[caller] != number:
            mine = self._waiting[caller, number] = asyncio.Event()
            await mine.wait()

    def _next(self, caller: str, number: int) -> None:
        self._turns[caller] = number + 1
        waiting = self._waiting.pop((caller, number + 1), None)
        if waiting is not None:
            waiting.set()


def _stored(values: Sequence[Any]) -> list[Any]:
    import ray

    return [ray.put(value) for value in values]


def portable(error: Exception, role: str, method: str) -> Exception:
    """The error as another process can get it, with the traceback as its cause.

    A `ValueError` of somebody else's code is no message for users, and turns into `RoleFailed`.
    """
    text = "".join(traceback.format_exception(error))
    theirs = isinstance(error, ValueError) and not _raised_by_us(error)
    if theirs or not _survives(error):
        error = RoleFailed(f"role '{role}' failed in '{method}': {error!r}")
    else:
        error = error.with_traceback(None)
        error.__context__ = None
    error.__cause__ = RemoteTraceback(text)
    return error


def _raised_by_us(error: BaseException) -> bool:
    frames = inspect.getinnerframes(error.__traceback__) if error.__traceback__ is not None else []
    return bool(frames) and str(frames[-1].frame.f_globals.get("__name__")).partition(".")[0] == "limes"


def _survives(error: Exception) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:  # noqa: BLE001 (whatever goes wrong: it does not)
        return False


__all__ = ["Failure", "HostInfo", "HostSettings", "RoleEnded", "RoleFailed", "RoleHost", "Surroundings"]
