from __future__ import annotations

import asyncio

import pytest
from reward_cases import answered

from limes.config.reward import RewardConfig
from limes.rewards import build_grader
from limes.rewards.gym import GymGrader, gym_answer

reasoning_gym = pytest.importorskip("reasoning_gym")


def entry(task: str, **options):
    return reasoning_gym.create_dataset(task, size=1, seed=3, **options)[0]


def sample(task: str, response: str, item=None, **more):
    item = item or entry(task)
    return answered(response, item.get("answer"), metadata={"reasoning_gym": {"task": task, "entry": item, **more}})


@pytest.fixture(scope="module")
def grader():
    grader = build_grader(RewardConfig(kind="reasoning_gym"))
    yield grader
    asyncio.run(grader.close())


def grade(grader, *samples):
    return asyncio.run(grader.grade(list(samples)))


TASKS = [
    "chain_sum",
    "leg_counting",
    "spiral_matrix",
    "number_sorting",
    "polynomial_multiplication",
    "basic_arithmetic",
]


@pytest.mark.parametrize("task", TASKS)
def test_own_answers_are_right_and_others_wrong(grader, task):
    item = entry(task)
    right, wrong, nothing = grade(
        grader, sample(task, str(item["answer"]), item), sample(task, "no idea", item), sample(task, "", item)
    )
    assert [(found.reward, found.error) for found in (right, wrong, nothing)] == [(1.0, None), (0.0, None), (0.0, None)]


def test_small_credits_stay_if_told_so(grader):
    raw = GymGrader(binarise=False)
    raw.pool = grader.pool  # no second process
    item = entry("chain_sum")
    (found,) = grade(raw, sample("chain_sum", f"{item['answer']} or so", item))
    assert 0 < found.reward < 1


@pytest.mark.parametrize(
    "task", ["countdown", "spiral_matrix", "polynomial_multiplication", "simple_integration", "n_queens"]
)
@pytest.mark.parametrize(
    "attack",
    ["__import__('pathlib').Path({path!r}).touch()", "open({path!r}, 'w')", "S('open({path!r})')", "().__class__"],
)
def test_answer_that_is_python_has_no_effect(grader, task, attack, tmp_path):
    path = str(tmp_path / "made")
    (found,) = grade(grader, sample(task, attack.format(path=path)))
    assert (found.reward, found.error) == (0.0, None)
    assert not (tmp_path / "made").exists()


def test_power_tower_is_an_error_and_the_next_sample_is_graded():
    grader = GymGrader(timeout_s=2)
    item = entry("chain_sum")
    tower, fine = grade(grader, sample("countdown", "9**9**9**9**9"), sample("chain_sum", item["answer"], item))
    asyncio.run(grader.close())
    assert tower.reward is None
    assert tower.error.startswith("TimedOut")
    assert fine.reward == 1.0


def test_options_of_the_task_reach_its_verifier(grader):
    """puzzle24 accepts numbers up to its `max_value`, 10 unless told otherwise."""
    item = entry("puzzle24", max_value=5)
    found = grade(
        grader,
        sample("puzzle24", "6*4*1*1", item, options={"max_value": 5}),
        sample("puzzle24", "6*4*1*1", item),
        sample("puzzle24", "3*4*2*1", item, options={"max_value": 5}),
    )
    assert [each.reward for each in found] == [0.0, 1.0, 1.0]


def test_entries_of_composite_are_scored_by_their_own_task(grader):
    from reasoning_gym.composite import DatasetSpec

    item = entry("composite", datasets=[DatasetSpec(name="chain_sum", weight=1, config={})])
    (found,) = grade(grader, sample("composite", item["answer"], item))
    assert found.reward == 1.0


def test_missing_metadata_and_unknown_tasks_are_errors(grader):
    bare, unknown, broken = grade(
        grader,
        answered("5", "5"),
        sample("no_such_task", "5", entry("chain_sum")),
        sample("chain_sum", "5", {"question": "?"}),
    )
    assert bare.error.startswith("ValueError: metadata has no")
    assert "no_such_task" in unknown.error
    assert broken.reward is None
    assert broken.error


@pytest.mark.parametrize(
    ("response", "extract", "answer"),
    [
        ("<think>1</think> so <answer>1</answer> <answer> 2 </answer>", "auto", "2"),
        (r"it is \boxed{3}", "auto", "3"),
        (" 4\n", "auto", "4"),
        ("<answer></answer>", "auto", None),
        ("", "auto", None),
        ("<answer>5</answer>", "whole", "<answer>5</answer>"),
        ("work\n 6 \n\n", "last_line", "6"),
        ("7 + 5 = 12.", "last_integer", "12"),
        ("none", "last_integer", None),
    ],
)
def test_which_part_of_a_response_is_the_answer(response, extract, answer):
    assert gym_answer(response, extract) == answer
