"""The groups of a rollout: how many, which, in what order, whatever finishes first."""

import asyncio
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_fakes import HANG, STOP, FakeEngine, FakeGrader, FakeSource, fake_sampler

from limes.engine.protocol import EngineError, SampleKey
from limes.records import Group, Status
from limes.rollout.filters import nonzero_std
from limes.rollout.groups import CollectedGroups, GroupLoop, NoGroupsLeft


def collect(
    source: FakeSource,
    engine: FakeEngine,
    grader: FakeGrader | None = None,
    *,
    rollout_id: int = 0,
    batch_size: int = 4,
    num_in_flight: int = 4,
    max_dropped: int = 40,
    keep=None,
    timeout_s: float = 60.0,
) -> CollectedGroups:
    async def main() -> CollectedGroups:
        return await GroupLoop(
            source,
            fake_sampler(engine, grader, timeout_s=timeout_s),
            keep=keep,
            key=lambda position: SampleKey(42, rollout_id, position),
            batch_size=batch_size,
            num_in_flight=num_in_flight,
            max_dropped=max_dropped,
        ).run()

    return asyncio.run(main())


def drop_every_third(group: Group) -> tuple[bool, str]:
    return group[0].group_index % 3 != 0, "third"


def contents(found: CollectedGroups) -> list[tuple]:
    return [(s.group_index, s.index, tuple(s.tokens), s.reward, s.status) for group in found.kept for s in group]


def test_without_a_filter_all_drawn_groups_are_kept_in_order() -> None:
    found = collect(FakeSource(), FakeEngine())
    assert [group[0].group_index for group in found.kept] == [0, 1, 2, 3]
    assert (found.dropped, found.num_surplus) == ([], 0)


def test_dropped_groups_are_replaced_until_there_are_exactly_enough() -> None:
    """U37."""
    found = collect(FakeSource(), FakeEngine(), keep=drop_every_third)
    assert [group[0].group_index for group in found.kept] == [1, 2, 4, 5]
    assert found.drop_reasons == Counter({"third": 2})


def test_when_all_groups_are_dropped_it_ends_with_the_reasons() -> None:
    """U37: bounded, with a clear error, and the prompts that were not needed go back."""
    source = FakeSource()

    def keep(group: Group) -> tuple[bool, str]:
        return False, "too easy" if group[0].group_index % 2 else "too hard"

    with pytest.raises(NoGroupsLeft, match=r"dropped 40 groups and kept 0 of 4; reasons: too hard: 20, too easy: 20"):
        collect(source, FakeEngine(), keep=keep)
    assert source.num_drawn <= 44


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(0, 6))
def test_timing_changes_nothing(seed: int, batch_size: int, extra: int) -> None:
    """Answers, noise, kept groups and the stream of prompts are the same in whatever order answers finish."""

    def three_rollouts(rng: random.Random | None) -> list[list[tuple]]:
        source, engine = FakeSource(), FakeEngine(pauses=lambda request: rng.randrange(30) if rng else 0)
        return [
            contents(
                collect(
                    source,
                    engine,
                    rollout_id=rollout_id,
                    batch_size=batch_size,
                    num_in_flight=batch_size + extra,
                    keep=drop_every_third,
                )
            )
            for rollout_id in range(3)
        ]

    assert three_rollouts(random.Random(seed)) == three_rollouts(None)


def test_surplus_prompts_are_served_first_next_time_and_none_is_lost() -> None:
    """U88: every prompt is used once, in order, though more were in flight than kept."""
    source = FakeSource()
    found = [collect(source, FakeEngine(), num_in_flight=7, rollout_id=i) for i in range(3)]
    assert [group[0].group_index for rollout in found for group in rollout.kept] == list(range(12))
    assert [rollout.num_surplus for rollout in found] == [3, 3, 3]


def test_surplus_comes_before_what_waits_already() -> None:
    source = FakeSource()
    source.put_back(source.next_groups(9))
    collect(source, FakeEngine(), batch_size=2, num_in_flight=4)
    assert [group[0].group_index for group in source.next_groups(9)] == [2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_surplus_goes_back_untouched_and_its_requests_are_aborted() -> None:
    source = FakeSource()
    engine = FakeEngine(answer=lambda request: HANG if request.prompt_ids[0] >= 104 else [11, STOP])
    found = collect(source, engine, num_in_flight=6)
    assert len(found.kept) == 4
    assert sorted(engine.aborted) == ["rollout-0-10", "rollout-0-11", "rollout-0-8", "rollout-0-9"]
    assert all(s.status is Status.PENDING and s.tokens == [s.tokens[0], 7] for group in source.waiting for s in group)


def test_a_slow_early_group_is_waited_for_rather_than_replaced_by_a_fast_one() -> None:
    """Otherwise long answers would lose their place to short ones."""
    engine = FakeEngine(pauses=lambda request: 200 if request.prompt_ids[0] == 100 else 0)
    found = collect(FakeSource(), engine, batch_size=2, num_in_flight=5)
    assert [group[0].group_index for group in found.kept] == [0, 1]


def test_noise_is_keyed_by_the_place_in_the_rollout() -> None:
    engine, source = FakeEngine(pauses=lambda request: request.key.sample_index % 5), FakeSource()
    source.next_groups(3)  # earlier rollouts have drawn some
    collect(source, engine, rollout_id=9, keep=drop_every_third)
    keyed = {request.key.sample_index: request.prompt_ids[0] for request in engine.requests}
    assert all(prompt == 103 + position // 2 for position, prompt in keyed.items())
    assert {(request.key.seed, request.key.rollout_id) for request in engine.requests} == {(42, 9)}
    assert len(keyed) == len(engine.requests), "two samples share their noise"


def test_another_rollout_and_another_seed_have_other_noise() -> None:
    """U87, with an engine whose answers follow the key alone."""
    first, again, other = (contents(collect(FakeSource(), FakeEngine(), rollout_id=i)) for i in (0, 0, 1))
    assert first == again
    assert [line[2] for line in first] != [line[2] for line in other]


def test_answers_stay_with_their_prompts() -> None:
    """U85: an engine that echoes the prompt's marker, answers in any order."""
    rng = random.Random(3)
    engine = FakeEngine(answer=lambda r: [r.prompt_ids[0], STOP], pauses=lambda request: rng.randrange(50))
    found = collect(FakeSource(), engine, keep=drop_every_third)
    for group in found.kept:
        for sample in group:
            assert sample.response_tokens[0] == 100 + sample.group_index == 100 + sample.label


def test_failing_answers_neither_end_nor_shorten_the_rollout() -> None:
    """U77: one of eight rollouts raises."""
    engine = FakeEngine(answer=lambda r: EngineError("dead") if r.key.sample_index == 5 else [11, STOP])
    found = collect(FakeSource(), engine)
    failed = [s for group in found.kept for s in group if s.status is Status.FAILED]
    assert len(found.kept) == 4
    assert [(s.index, s.error) for s in failed] == [(5, "EngineError: dead")]


def test_a_lost_prompt_does_not_hold_the_rollout_for_ever() -> None:
    """U78."""
    engine = FakeEngine(answer=lambda r: HANG if r.key.sample_index == 2 else [11, STOP])
    found = collect(FakeSource(), engine, timeout_s=0.05)
    assert [s.index for group in found.kept for s in group if s.status is Status.FAILED] == [2]


def test_groups_without_any_score_are_dropped_by_the_spread_filter() -> None:
    grader = FakeGrader(lambda sample: None if sample.group_index == 1 else float(sample.index % 2))
    found = collect(FakeSource(), FakeEngine(), grader, keep=nonzero_std)
    assert [group[0].group_index for group in found.kept] == [0, 2, 3, 4]
    assert found.drop_reasons == Counter({"no scored answer": 1})


def test_a_cancelled_loop_leaves_nothing_running_and_gives_all_prompts_back() -> None:
    source = FakeSource()
    engine = FakeEngine(answer=lambda request: HANG)

    async def main() -> set[str]:
        loop = asyncio.create_task(
            GroupLoop(
                source,
                fake_sampler(engine),
                keep=None,
                key=lambda position: SampleKey(42, 0, position),
                batch_size=3,
                num_in_flight=3,
                max_dropped=30,
            ).run()
        )
        while len(engine.requests) < 6:
            await asyncio.sleep(0)
        loop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loop
        return {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}

    assert asyncio.run(main()) == set()
    assert sorted(engine.aborted) == sorted(request.request_id for request in engine.requests)
    assert [group[0].group_index for group in source.waiting] == [0, 1, 2]
