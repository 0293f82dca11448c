from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limes.records import Sample, step_bounds
from limes.rollout.deal import TOLERANCE, deal, karmarkar_karp, text_cost
from limes.rollout.sft import supervised_shards


def sample(group: int, prompt: int, answer: int) -> Sample:
    made = Sample(0, group, tokens=[1] * prompt)
    made.append_tokens([2] * answer, log_probs=[0.0] * answer, weight_versions=[0] * answer)
    return made


def rollout(shapes: list[tuple[int, list[int]]]) -> list[Sample]:
    """Groups of (prompt length, answer lengths)."""
    return [sample(group, prompt, answer) for group, (prompt, answers) in enumerate(shapes) for answer in answers]


groups = st.lists(st.tuples(st.integers(1, 50), st.lists(st.integers(1, 200), min_size=1, max_size=6)), max_size=8)


@given(groups, st.integers(1, 5), st.integers(1, 3), st.booleans(), st.randoms())
def test_every_sample_that_trains_is_on_one_rank(shapes, num_ranks, num_steps, keep_groups, draw) -> None:
    samples = rollout(shapes)
    trained = [i for i in range(len(samples)) if draw.random() < 0.8]
    dealt = deal(samples, trained, num_ranks, num_steps=num_steps, keep_groups=keep_groups)
    assert len(dealt) == num_ranks
    assert sorted(position for own in dealt for position in own) == trained
    assert all(own == sorted(own) for own in dealt)
    if keep_groups and num_steps == 1:
        homes = [{samples[position].group_index for position in own} for own in dealt]
        assert all(not a & b for i, a in enumerate(homes) for b in homes[:i])


@given(st.lists(st.floats(0, 100), max_size=30), st.integers(1, 6))
def test_karmarkar_karp_puts_each_item_into_one_part_and_is_no_worse_than_the_greedy_bound(costs, num) -> None:
    parts = karmarkar_karp(costs, num)
    assert len(parts) == num
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    largest = max((sum(costs[i] for i in part) for part in parts), default=0.0)
    assert largest <= sum(costs) / num + max(costs, default=0.0) + 1e-9


def test_karmarkar_karp_differences_the_largest() -> None:
    parts = karmarkar_karp([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in parts) == [14, 16]


def test_groups_stay_together_where_the_work_is_even() -> None:
    samples = rollout([(20, [10, 30, 20, 5])] * 8)
    dealt = deal(samples, range(len(samples)), 4)
    assert [len(own) for own in dealt] == [8] * 4
    assert [len({samples[i].group_index for i in own}) for own in dealt] == [2] * 4


def test_a_group_is_cut_where_it_would_keep_the_others_waiting() -> None:
    samples = rollout([(4, [100] * 8), (4, [5] * 2)])
    dealt = deal(samples, range(len(samples)), 2)
    loads = [sum(len(samples[i].tokens) for i in own) for own in dealt]
    assert max(loads) <= TOLERANCE * sum(loads) / 2
    kept = deal(samples, range(len(samples)), 2, keep_groups=True)
    assert sorted(map(len, kept)) == [2, 8]


def test_long_texts_cost_more_than_their_tokens() -> None:
    assert text_cost(0, 100, dense=1e9) == pytest.approx(100)
    assert text_cost(0, 4, dense=1.0) == pytest.approx(4 + 0 + 1 + 2 + 3)
    assert text_cost(2, 4, dense=1.0) == pytest.approx(2 + 2 + 3)
    samples = rollout([(1, [30_000]), (1, [15_000]), (1, [15_000]), (1, [15_000])])
    first, second = (sum(len(samples[i].tokens) for i in own) for own in deal(samples, range(4), 2))
    assert {first, second} == {30_001, 45_003}  # attention makes up for the tokens


@given(groups, st.integers(2, 4), st.integers(1, 4))
def test_each_step_is_balanced_for_itself(shapes, num_ranks, num_steps) -> None:
    samples = rollout(shapes)
    dealt = deal(samples, range(len(samples)), num_ranks, num_steps=num_steps)
    for start, end in pairwise(step_bounds(len(samples), num_steps)):
        counts = [sum(start <= i < end for i in own) for own in dealt]
        if end - start >= num_ranks:
            loads = [sum(text_cost(0, len(samples[i].tokens)) for i in own if start <= i < end) for own in dealt]
            longest = max(text_cost(0, len(samples[i].tokens)) for i in range(start, end))
            assert max(loads) <= TOLERANCE * sum(loads) / num_ranks + longest * 2, counts


def test_given_answers_are_dealt_out_likewise() -> None:
    samples = rollout([(20, [10, 30])] * 4)
    shards = supervised_shards(3, samples, 2)
    assert sorted(i for shard in shards for i in shard.partition) == list(range(8))
    assert [{s.group_index for s in shard.samples} & {0} for shard in shards].count({0}) == 1
