"""Graders that users write: any `module:function`.

A function takes a sample, or with `reward.group` the list of all samples of a group, and then `reward.options` as
keyword arguments. It returns a reward (for a group a list of them): a number, a dict, or None for unscored.

It may be async: then it runs on the event loop and must not block it. Any other runs in a thread. When it takes longer
than `reward.timeout_s` the sample gets an error and the thread is left behind: Python cannot kill it, and a function
that hangs in C code without releasing the interpreter lock stops the whole process. Once 32 threads hang, calls are
refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import functools
import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from limes.records import Reward, Sample
from limes.rewards.grade import EachSample, Grade, GraderError, TimedOut, attempt, failed
from limes.rewards.per_loop import PerLoop

MAX_THREADS = 32


def import_function(path: str, setting: str = "reward.kind") -> Callable[..., Any]:
    """Import `module:function`; the current folder is searched last.

    Raises:
        ValueError: names the setting, what went wrong and what to do.
    """
    module_name, _, name = path.partition(":")
    where = f'{setting} = "{path}"'
    if not module_name or not name:
        raise ValueError(f"{where} is not of the form module:function")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"{where}: there is no module {error.name!r}; start limes in the folder that holds it, or put that "
                "folder on PYTHONPATH"
            ) from error
        raise ValueError(
            f"{where}: importing it fails with {type(error).__name__}: {error}; mend the module"
        ) from error
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if function is None:
        near = difflib.get_close_matches(name, vars(module), n=1)
        hint = f"did you mean {near[0]}?" if near else f"it is looked up in {module.__file__}"
        raise ValueError(f"{where}: module {module_name!r} has no {name!r}; {hint}")
    if not callable(function):
        raise ValueError(f"{where} is a {type(function).__name__}, not a function; name one that takes a sample")
    return function


def check_call(function: Callable[..., Any], options: Mapping[str, Any], setting: str, options_setting: str) -> None:
    """Check that a function takes a sample and the options.

    Raises:
        ValueError: names the settings.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have none; calling them will tell
        return
    takes = signature.parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
        for name in options:
            if name not in takes:
                near = difflib.get_close_matches(name, takes, n=1)
                hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(takes)}"
                raise ValueError(f"{options_setting}.{name} is no argument of {setting}; {hint}")
    try:
        signature.bind(None, **options)
    except TypeError as error:
        raise ValueError(
            f"{setting} is called with a sample (reward.group: a list of samples) and {options_setting}, and takes "
            f"{signature}: {error}"
        ) from error


class FunctionGrader(EachSample):
    """Scores with a user's function.

    Args:
        function: sync or async, see the module's docstring.
        name: what errors call it.
        options: keyword arguments of every call.
        group: it takes the samples of a group and returns one reward each.
        key: entry of dict rewards that must be there.
        timeout_s: limit of one call.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str,
        options: Mapping[str, Any] | None = None,
        group: bool = False,
        key: str | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        self._function = functools.partial(function, **(options or {}))
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 (an object whose call is async)
        )
        super().__init__(key)
        self._name, self._group, self._timeout_s = name, group, timeout_s
        self._slots: PerLoop[asyncio.Semaphore] = PerLoop(lambda: asyncio.Semaphore(MAX_THREADS))
        self._hanging: list[threading.Thread] = []

    async def grade(self, samples: list[Sample]) -> list[Grade]:
        """One grade a sample; groups are told apart by their id."""
        if not self._group:
            return await super().grade(samples)
        groups: dict[int, list[int]] = {}
        for position, sample in enumerate(samples):
            groups.setdefault(sample.group_index, []).append(position)
        grades: dict[int, Grade] = {}
        graded = await asyncio.gather(*(self._grade_group([samples[i] for i in group]) for group in groups.values()))
        for group, found in zip(groups.values(), graded, strict=True):
            grades.update(zip(group, found, strict=True))
        return [grades[position] for position in range(len(samples))]

    async def score(self, sample: Sample) -> Reward:
        """What the function returns."""
        return await self._call(sample)

    async def _grade_group(self, samples: list[Sample]) -> list[Grade]:
        try:
            rewards = as_rewards(await self._call(samples), len(samples))
        except Exception as error:  # noqa: BLE001 (any fault of a user's function is counted by its cause)
            return [failed(error)] * len(samples)
        return [await attempt(functools.partial(_returned, reward), self.key) for reward in rewards]

    async def _call(self, argument: Sample | list[Sample]) -> Any:
        if self._is_async:
            return await self._bounded(self._function(argument), self._timeout_s)
        async with self._slots.get():
            deadline = asyncio.get_running_loop().time() + self._timeout_s
            result = await self._in_thread(argument)
            if inspect.isawaitable(result):
                return await self._bounded(result, deadline - asyncio.get_running_loop().time())
            return result

    async def _bounded(self, awaitable: Any, timeout_s: float) -> Any:
        """Await with a limit that holds even where cancellation is ignored."""
        task = asyncio.ensure_future(awaitable)
        try:
            done, _ = await asyncio.wait({task}, timeout=timeout_s)
        finally:
            task.cancel()
        if not done:
            task.add_done_callback(_forget)
            raise self._too_late()
        if task.cancelled():
            raise GraderError(f"{self._name} cancelled itself")
        return task.result()

    def _too_late(self) -> TimedOut:
        return TimedOut(f"{self._name} did not return within {self._timeout_s:g} s (reward.timeout_s)")

    async def _in_thread(self, argument: Sample | list[Sample]) -> Any:
        """Call the function in a daemon thread of its own, so that a hang neither blocks later calls nor the exit."""
        self._hanging = [thread for thread in self._hanging if thread.is_alive()]
        if len(self._hanging) >= MAX_THREADS:
            raise GraderError(f"{MAX_THREADS} earlier calls of {self._name} still hang")
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def run() -> None:
            try:
                result: tuple[Any, BaseException | None] = (self._function(argument), None)
            except BaseException as error:  # noqa: BLE001 (SystemExit too must not be lost with its thread)
                result = (None, error)
            _hand_over(loop, outcome, result)

        thread = threading.Thread(target=run, name=f"limes-{self._name}", daemon=True)
        thread.start()
        try:
            result, error = await asyncio.wait_for(outcome, self._timeout_s)
        except (TimeoutError, asyncio.CancelledError) as late:
            self._hanging.append(thread)
            if isinstance(late, asyncio.CancelledError):
                raise
            raise self._too_late() from None
        if error is not None:
            raise error if isinstance(error, Exception) else GraderError(f"{self._name} raised {error!r}")
        return result


def as_rewards(returned: Any, num_samples: int) -> Sequence[Any]:
    """What a group function returned as one reward a sample.

    Raises:
        ValueError: it is no sequence of that length.
    """
    if isinstance(returned, str | bytes | Mapping) or not hasattr(returned, "__len__"):
        raise ValueError(f"a group's rewards must be a list, not {type(returned).__name__}")
    if len(returned) != num_samples:
        raise ValueError(f"{num_samples} samples of a group got {len(returned)} rewards")
    return list(returned)


async def _returned(reward: Reward) -> Reward:
    return reward


def _hand_over(loop: asyncio.AbstractEventLoop, outcome: asyncio.Future[Any], result: Any) -> None:
    """Give a thread's result to the loop that waits for it, if it still does."""

    def deliver() -> None:
        if not outcome.done():
            outcome.set_result(result)

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
        loop.call_soon_threadsafe(deliver)


def _forget(task: asyncio.Future[Any]) -> None:
    """Take the exception of a task nobody waits for any more, so that asyncio does not print it."""
    if not task.cancelled():
        task.exception()
