"""The groups of one rollout: drawn, sampled, filtered, replaced, until there are exactly as many as asked for.

Which groups are kept depends on the order they were drawn in and on their rewards, never on which finished first: the
first `batch_size` that pass the filter, in draw order. Taking the first to finish instead would favour short answers
and make a run irreproducible. What was drawn beyond them goes back to the cursor, to be drawn first next time, so the
stream of prompts is the same whatever the timing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from limes.config.counting import num_of
from limes.engine.protocol import SampleKey
from limes.records import Group
from limes.rollout.filters import Filter
from limes.rollout.sampling import Sampler, fresh


class NoGroupsLeft(RuntimeError):
    """The filter dropped so many groups that the rollout cannot be filled; the message lists the reasons."""


class GroupSource(Protocol):
    """Where groups come from and go back to."""

    def next_groups(self, n: int, /) -> list[Group]:
        """Fresh groups, those that were put back first."""

    def put_back(self, groups: list[Group], /) -> None:
        """Keep groups for later, behind those that were put back before."""

    @property
    def num_put_back(self) -> int:
        """Groups that wait to be served again."""


@dataclass(slots=True)
class CollectedGroups:
    """What a rollout ends with. Groups are in draw order."""

    kept: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)
    drop_reasons: Counter[str] = field(default_factory=Counter)
    num_surplus: int = 0


@dataclass(slots=True)
class _Drawn:
    original: Group
    group: Group
    verdict: tuple[bool, str] | None = None


class GroupLoop:
    """Fills one rollout with groups.

    Args:
        source: the data cursor.
        sampler: samples and grades a group.
        keep: the dynamic filter; None keeps every group.
        key: noise of the sample at a position of the rollout: draw number of its group times group size, plus its place
            in the group. It knows nothing of timing, so a refilled rollout can be repeated.
        batch_size: groups to end with.
        num_in_flight: groups drawn at first and kept up while some are dropped; at least `batch_size`.
        max_dropped: with this many groups dropped and the rollout still not full, it fails.
        on_dropped: called when a group is dropped.
    """

    def __init__(
        self,
        source: GroupSource,
        sampler: Sampler,
        *,
        keep: Filter | None,
        key: Callable[[int], SampleKey],
        batch_size: int,
        num_in_flight: int,
        max_dropped: int,
        on_dropped: Callable[[Group], None] = lambda group: None,
    ) -> None:
        self._source = source
        self._sampler = sampler
        self._keep = keep
        self._key = key
        self._batch_size = batch_size
        self._num_in_flight = max(num_in_flight, batch_size)
        self._max_dropped = max_dropped
        self._on_dropped = on_dropped
        self._drawn: list[_Drawn] = []
        self._tasks: dict[asyncio.Task[None], _Drawn] = {}
        self._num_decided = 0
        self._collected = CollectedGroups()

    async def run(self) -> CollectedGroups:
        """Sample until the rollout is full.

        Raises:
            NoGroupsLeft: the filter dropped `max_dropped` groups and the rollout is not full.
        """
        try:
            await self._sampler.submit_together(self._draw)
            while not self._decide():
                self._draw()
                done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    self._judge(self._tasks.pop(task), task)
        finally:
            await self._return_surplus()
        return self._collected

    def _draw(self) -> dict[asyncio.Task[None], Group]:
        """Draw as many groups as are missing; the tasks that complete them. Past the most that can be needed nothing is
        drawn."""
        num_alive = sum(drawn.verdict is None or drawn.verdict[0] for drawn in self._drawn)
        most = max(self._num_in_flight, self._batch_size + self._max_dropped)
        num_missing = min(self._num_in_flight - num_alive, most - len(self._drawn))
        if num_missing <= 0:
            return {}
        tasks: dict[asyncio.Task[None], Group] = {}
        for original in self._source.next_groups(num_missing):
            group = [fresh(sample) for sample in original]
            first = sum(len(drawn.group) for drawn in self._drawn)
            keys = [self._key(first + member) for member in range(len(group))]
            drawn = _Drawn(original, group)
            self._drawn.append(drawn)
            task = asyncio.create_task(self._sampler.complete_group(group, keys))
            self._tasks[task], tasks[task] = drawn, group
        return tasks

    def _judge(self, drawn: _Drawn, task: asyncio.Task[None]) -> None:
        task.result()  # the sampler marks samples instead of raising; anything raised here is a fault of ours
        drawn.verdict = self._keep(drawn.group) if self._keep else (True, "")
        if not drawn.verdict[0]:
            self._on_dropped(drawn.group)

    def _decide(self) -> bool:
        """Take verdicts in draw order as far as they are known; whether the rollout is full."""
        found = self._collected
        while self._num_decided < len(self._drawn):
            drawn = self._drawn[self._num_decided]
            if drawn.verdict is None:
                return False
            keep, reason = drawn.verdict
            (found.kept if keep else found.dropped).append(drawn.group)
            self._num_decided += 1
            if not keep:
                found.drop_reasons[reason] += 1
            if len(found.kept) == self._batch_size:
                return True
            if len(found.dropped) >= self._max_dropped:
                raise NoGroupsLeft(explain_drops(found, self._batch_size))
        return False

    async def _return_surplus(self) -> None:
        surplus = self._drawn[self._num_decided :]
        self._collected.num_surplus = len(surplus)
        await self._sampler.stop(list(self._tasks))
        if surplus:
            waiting = self._source.next_groups(self._source.num_put_back)
            self._source.put_back([*(drawn.original for drawn in surplus), *waiting])


def explain_drops(found: CollectedGroups, batch_size: int) -> str:
    """Say how far the rollout came and why groups were dropped."""
    reasons = ", ".join(f"{reason}: {count}" for reason, count in found.drop_reasons.most_common())
    return (
        f"rollout.dynamic_sampling_filter dropped {num_of(len(found.dropped), 'group')} and kept {len(found.kept)} of "
        f"{batch_size}; reasons: {reasons}. Use easier or harder prompts, more answers a prompt "
        "(rollout.n_samples_per_prompt), another filter, or raise rollout.max_refill_rounds"
    )
