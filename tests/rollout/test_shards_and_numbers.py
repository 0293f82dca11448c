"""What a rollout trains on, and what it reports."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_fakes import new_sample

from limes.config import load_config
from limes.config.algorithm import AlgorithmConfig
from limes.records import Sample, Status
from limes.rollout.groups import CollectedGroups
from limes.rollout.metrics import equal_groups, rollout_metrics, sample_metrics
from limes.rollout.remarks import failure_remarks, rollout_remarks, singleton_remarks
from limes.rollout.shards import length_term_of, make_shards
from limes.run.metrics import combine, reduce


def answered(
    index: int, reward: object, *, group: int = 0, length: int = 3, status: Status = Status.COMPLETED
) -> Sample:
    sample = new_sample(index, group_index=group)
    sample.append_tokens([50 + index] * length, log_probs=[-1.0] * length, weight_versions=[1] * length)
    sample.reward, sample.status = reward, status  # type: ignore[assignment]
    return sample


@given(st.lists(st.sampled_from([0.0, 1.0, None]), min_size=1, max_size=20), st.integers(1, 4))
def test_ids_follow_their_samples_through_any_partition(rewards: list, num_ranks: int) -> None:
    """U86 and P3: whatever the number of ranks, global position p means sample p, and each trains exactly once."""
    samples = [answered(100 + i, reward, group=i // 2) for i, reward in enumerate(rewards)]
    shards = make_shards(7, samples, num_ranks=num_ranks)
    seen: dict[int, Sample] = {}
    for shard in shards:
        assert shard.rewards == rewards
        assert shard.group_ids == [sample.group_index for sample in samples]
        assert len(shard.samples) == len(shard.partition)
        for position, sample in zip(shard.partition, shard.samples, strict=True):
            assert position not in seen
            seen[position] = sample
            assert shard.rewards[position] == sample.reward
    assert {p: s.index for p, s in seen.items()} == {
        p: 100 + p for p, reward in enumerate(rewards) if reward is not None
    }


def test_trained_tokens_are_counted_over_the_whole_rollout() -> None:
    """P6: the counts are those of the tokens that the shards carry with mask 1."""
    samples = [answered(0, 1.0, length=4), answered(1, None, length=5), answered(2, 0.0, length=2)]
    samples[0].append_tokens([9, 9], trainable=False)
    shards = make_shards(0, samples, num_ranks=2)
    assert shards[0].num_trained_tokens == [4, 0, 2]
    assert sum(sum(s.loss_mask) for shard in shards for s in shard.samples) == 6


@pytest.mark.parametrize(
    ("policy", "rewards", "trained"),
    [("keep", [1.0, 1.0], [3, 3]), ("zero", [1.0, 0.0], [3, 3]), ("mask", [1.0, None], [3, 0])],
)
def test_truncated_answers_are_kept_zeroed_or_left_out(policy: str, rewards: list, trained: list[int]) -> None:
    """U119 and U19: left out means out of the group's statistics too; the sample itself keeps its reward and mask."""
    samples = [answered(0, 1.0), answered(1, 1.0, status=Status.TRUNCATED)]
    (shard,) = make_shards(0, samples, truncated=policy)  # type: ignore[arg-type]
    assert (shard.rewards, shard.num_trained_tokens) == (rewards, trained)
    assert (samples[1].reward, samples[1].loss_mask) == (1.0, [1, 1, 1])


def test_a_soft_penalty_for_length_shapes_what_trains_and_not_the_sample() -> None:
    """T12, times the weight: 12, 13, 14 and 16 of 16 tokens, with a buffer of 4."""
    settings = {"rollout.num_rollout": 1, "rollout.max_response_len": 16, "data.max_prompt_len": 8}
    penalised = {"algorithm.overlong_buffer": 4, "algorithm.overlong_penalty": 2.0}
    term = length_term_of(load_config(None, settings | penalised))
    samples = [answered(i, 1.0, length=length) for i, length in enumerate((12, 13, 14, 16))]
    samples[3].status = Status.TRUNCATED
    assert make_shards(0, samples, length_term=term)[0].rewards == [1.0, 0.5, 0.0, -1.0]
    assert make_shards(0, samples, length_term=term, truncated="zero")[0].rewards == [1.0, 0.5, 0.0, -2.0]
    assert make_shards(0, samples, length_term=term, truncated="mask")[0].rewards == [1.0, 0.5, 0.0, None]
    assert [sample.reward for sample in samples] == [1.0] * 4
    assert length_term_of(load_config(None, settings)) is None


def test_failed_aborted_unscored_and_tokenless_answers_do_not_train() -> None:
    """U21: unscored is not zero."""
    samples = [
        answered(0, 1.0, status=Status.FAILED),
        answered(1, 1.0, status=Status.ABORTED),
        answered(2, None),
        answered(3, 1.0, length=0),
        answered(4, 0.0),
    ]
    (shard,) = make_shards(0, samples)
    assert shard.rewards == [None, None, None, None, 0.0]
    assert (shard.partition, [s.index for s in shard.samples]) == ([4], [4])


def test_the_trained_entry_of_a_dict_reward_is_chosen_by_key() -> None:
    samples = [answered(0, {"score": 1.0, "format": 0.25})]
    assert make_shards(0, samples)[0].rewards == [1.0]
    assert make_shards(0, samples, reward_key="format")[0].rewards == [0.25]


def test_a_rollout_of_failures_is_a_shard_without_samples() -> None:
    (shard,) = make_shards(0, [answered(0, None), answered(1, None)])
    assert (shard.samples, shard.partition, shard.num_trained_tokens) == ([], [], [0, 0])


def numbers(samples: list[Sample], reward_key: str | None = None) -> dict[str, float]:
    return reduce([sample_metrics(samples, reward_key, "rollout")])


def test_unscored_answers_are_outside_the_mean_and_counted() -> None:
    """U117 and U21: [1, None, {score: 0}] has the mean 1/2 over two, and one in three is unscored."""
    samples = [answered(0, 1.0), answered(1, None, group=1), answered(2, {"score": 0.0}, group=2)]
    found = numbers(samples)
    assert found["rollout/reward_mean"] == 0.5
    assert found["rollout/unscored"] / found["rollout/samples"] == pytest.approx(1 / 3)
    assert found["rollout/grader_errors"] == 0


def test_rewards_are_reported_by_the_source_of_their_prompts() -> None:
    samples = [answered(0, 1.0), answered(1, 0.0), answered(2, 0.25), answered(3, None), answered(4, 9.0)]
    for sample, source in zip(samples, ["sums", "sums", "other words", "sums", None], strict=True):
        sample.metadata |= {} if source is None else {"source": source}
    found = numbers(samples)
    assert found["rollout/reward_of/sums"] == 0.5
    assert found["rollout/reward_of/other_words"] == 0.25
    assert sum(name.startswith("rollout/reward_of/") for name in found) == 2


def test_grader_errors_are_counted_by_cause_and_apart_from_wrong_answers() -> None:
    samples = [answered(0, 0.0), answered(1, None), answered(2, None), answered(3, None)]
    samples[1].error = samples[2].error = "TimedOut: math took 2 s"
    samples[3].error = "KeyError: 'x'"
    found = numbers(samples)
    assert found["rollout/grader_errors"] == 3
    assert found["rollout/grader_errors/TimedOut"] == 2
    assert found["rollout/grader_errors/KeyError"] == 1
    assert found["rollout/failed"] == 0


def test_failures_are_counted_by_cause() -> None:
    samples = [answered(i, None, status=Status.FAILED) for i in range(3)]
    samples[0].error = samples[1].error = "EngineError: out of pages: 7 of 9"
    samples[2].error = "TimedOut: sample 2"
    found = numbers(samples)
    assert found["rollout/failed"] == 3
    assert found["rollout/failed/EngineError"] == 2
    assert found["rollout/failed/TimedOut"] == 1
    assert found["rollout/unscored"] == 0


def test_lengths_are_real_even_where_nothing_trains() -> None:
    """U70: lengths 3 and 5, all masked."""
    samples = [answered(0, 1.0, length=3), answered(1, 1.0, length=5)]
    for sample in samples:
        sample.loss_mask = [0] * sample.response_length
    found = numbers(samples)
    names = ("response_len_min", "response_len_max", "response_len_mean")
    assert [found[f"rollout/{name}"] for name in names] == [3, 5, 4]


def test_truncated_and_stop_reasons_are_of_the_answers_as_kept() -> None:
    samples = [answered(0, 1.0, status=Status.TRUNCATED), *(answered(i, 1.0) for i in range(1, 4))]
    found = numbers(samples)
    assert found["rollout/truncated_frac"] == 0.25
    assert (found["rollout/stop/truncated"], found["rollout/stop/completed"]) == (1, 3)


def test_parts_of_a_rollout_add_up_to_the_whole() -> None:
    """U123: maxima stay maxima, and a mean of unequal parts is the mean of everything."""
    samples = [answered(i, float(i), group=i, length=1 + i) for i in range(4)]
    whole = numbers(samples)
    parts = reduce([combine([sample_metrics(part, None, "rollout") for part in (samples[:1], samples[1:])])])
    interval = {"rollout/reward_ci95"}  # an interval does not add up
    assert {k: v for k, v in parts.items() if k not in interval} == {
        k: v for k, v in whole.items() if k not in interval
    }
    assert (whole["rollout/response_len_max"], whole["rollout/reward_mean"]) == (4, 1.5)


def test_dict_rewards_report_their_parts() -> None:
    samples = [answered(0, {"score": 1.0, "math": 1.0, "note": "x"}), answered(1, {"score": 0.0, "math": 0.5})]
    found = numbers(samples)
    assert found["rollout/reward/math"] == 0.75
    assert not any("note" in name for name in found)


def test_groups_without_a_signal_and_drops_are_counted() -> None:
    kept = [
        [answered(0, 1.0), answered(1, 1.0)],
        [answered(2, 1.0, group=1), answered(3, 0.0, group=1)],
        [answered(4, None, group=2), answered(5, None, group=2)],
    ]
    found = CollectedGroups(kept, [[answered(6, 0.0)]], Counter({"all rewards 0": 1}), num_surplus=2)
    (shard,) = make_shards(0, [s for group in kept for s in group])
    reported = reduce([rollout_metrics(found, None, shard)])
    assert reported["rollout/zero_std_frac"] == 0.5
    assert reported["rollout/dropped_groups"] == reported["rollout/dropped/all_rewards_0"] == 1
    assert (reported["rollout/surplus_groups"], reported["rollout/trained_samples"]) == (2, 4)


def test_zeroing_truncated_answers_can_be_the_only_signal() -> None:
    """Equal groups are those whose trained rewards are equal, not the raw ones."""
    samples = [answered(0, 1.0), answered(1, 1.0, status=Status.TRUNCATED)]
    assert equal_groups(make_shards(0, samples, truncated="zero")[0]) == (0, 1)
    assert equal_groups(make_shards(0, samples, truncated="mask")[0]) == (1, 1)


def test_equal_rewards_are_no_remark_of_the_rollout() -> None:
    """Whether they move something depends on the estimator, which training knows."""
    samples = [answered(0, 1.0), answered(1, 1.0)]
    assert rollout_remarks(samples, make_shards(0, samples)[0]) == []


def test_groups_of_one_answer_that_trains_are_a_remark_where_answers_are_compared() -> None:
    samples = [answered(0, 1.0), answered(1, None), answered(2, 1.0, group=1), answered(3, 0.0, group=1)]
    (shard,) = make_shards(0, samples)
    (remark,) = singleton_remarks(shard, AlgorithmConfig())
    assert remark.startswith("1 of 2 groups had one answer that trains: it has nothing to be compared with")
    assert singleton_remarks(shard, AlgorithmConfig(singletons="raw")) == []
    assert singleton_remarks(shard, AlgorithmConfig(advantage_estimator="reinforce_plus_plus")) == []
    assert singleton_remarks(make_shards(0, samples[2:])[0], AlgorithmConfig()) == []


def test_a_rollout_with_nothing_to_train_on_says_so_and_why() -> None:
    samples = [answered(0, None, status=Status.FAILED), answered(1, None)]
    samples[0].error, samples[1].error = "EngineError: dead", "KeyError: 'x'"
    assert rollout_remarks(samples, make_shards(0, samples)[0]) == [
        "1 of 2 answers failed: 1 x EngineError: dead",
        "1 of 2 answers could not be graded: 1 x KeyError: 'x'",
        "nothing to train on: none of 2 answers has a reward that trains",
    ]


def test_many_causes_are_summed_up() -> None:
    samples = [answered(i, None, status=Status.FAILED) for i in range(7)]
    for i, sample in enumerate(samples):
        sample.error = f"Cause{max(0, i - 2)}: detail {i}"
    (remark,) = failure_remarks(samples)
    assert remark == (
        "7 of 7 answers failed: 3 x Cause0: detail 0; 1 x Cause1: detail 3; 1 x Cause2: detail 4; and 2 more kinds"
    )
