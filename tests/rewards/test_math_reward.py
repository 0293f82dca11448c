from __future__ import annotations

import asyncio
import concurrent.futures
from pathlib import Path

import pytest
from reward_cases import T15, TOWER, answered

from limes.config.reward import RewardConfig, RewardTerm
from limes.rewards import build_grader, math_reward
from limes.rewards.maths import MathGrader

ROWS = pytest.mark.parametrize(("answer", "label", "reward"), T15)


@pytest.fixture(scope="module")
def grader():
    grader = build_grader(RewardConfig(kind="math"))
    yield grader
    asyncio.run(grader.close())


@ROWS
def test_t15_by_function(answer, label, reward):
    assert math_reward(answer, label) == reward


@ROWS
def test_t15_by_grader_name(grader, answer, label, reward):
    (grade,) = asyncio.run(grader.grade([answered(answer, label)]))
    assert (grade.reward, grade.error) == (reward, None)


@ROWS
def test_t15_from_worker_thread(answer, label, reward):
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        assert threads.submit(math_reward, answer, label).result() == reward


def test_t15_in_a_weighted_sum():
    grader = build_grader(RewardConfig(terms=[RewardTerm(kind="math", weight=2.0), RewardTerm(kind="f1", weight=0.0)]))

    async def run():
        grades = await grader.grade([answered(answer, label) for answer, label, _ in T15])
        await grader.close()
        return grades

    assert [grade.reward["score"] for grade in asyncio.run(run())] == [2 * reward for _, _, reward in T15]


def test_many_threads_at_once():
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        rewards = list(threads.map(lambda row: math_reward(row[0], row[1]), T15 * 4))
    assert rewards == [reward for _, _, reward in T15] * 4


def test_empty_label_is_an_error_never_a_reward():
    for label in (None, "", "  ", r"\boxed{}", "#### "):
        with pytest.raises(ValueError, match="label is empty"):
            math_reward("5", label)


def test_empty_label_is_counted_as_grader_error(grader):
    grades = asyncio.run(grader.grade([answered("5", ""), answered("6", "5"), answered("5", "5")]))
    assert [grade.reward for grade in grades] == [None, 0.0, 1.0]
    assert grades[0].error.startswith("ValueError: the label is empty")
    assert grades[1].error is None


def test_bad_limit_is_refused():
    with pytest.raises(ValueError, match="timeout_s"):
        math_reward("5", "5", timeout_s=0)


def test_power_tower_scores_0_and_the_next_sample_is_graded():
    grader = MathGrader(timeout_s=0.5)

    async def run():
        first = await grader.grade([answered("7", "7")])
        towers = await grader.grade([answered(TOWER, "5"), answered("7", "7")])
        await grader.close()
        return first + towers

    grades = asyncio.run(run())
    assert [(grade.reward, grade.error) for grade in grades] == [(1.0, None), (0.0, None), (1.0, None)]


def test_power_tower_by_function_within_a_short_limit():
    assert math_reward(TOWER, "5", timeout_s=0.3) == 0.0
    assert math_reward("5", "5") == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "__import__('pathlib').Path({path!r}).touch()",
        r"\boxed{{__import__('pathlib').Path({path!r}).touch()}}",
        "$open({path!r}, 'w')$",
        r"\boxed{{\text{{}}; open({path!r}, 'w')}}",
        "The answer is open({path!r}, 'w')",
        r"\boxed{{5 if open({path!r}, 'w') else 5}}",
    ],
)
def test_answer_that_is_python_has_no_effect(answer, tmp_path):
    path = tmp_path / "made"
    assert math_reward(answer.format(path=str(path)), "5") == 0.0
    assert not path.exists()


@pytest.mark.parametrize(
    ("answer", "label", "reward"),
    [
        (r"first \boxed{1}, then \boxed{2}", "2", 1.0),
        (r"first \boxed{1}, then \boxed{2}", "1", 0.0),
        (r"\boxed{5} and then \boxed{7", "5", 1.0),
        (r"\boxed{\boxed{5}}", "5", 1.0),
        (r"\boxed{\{1, 2\}}", "2, 1", 1.0),
        (r"\\boxed{5}", "5", 1.0),
        (r"\boxed{5}. Wait, the answer is 6.", "6", 1.0),
        (r"\boxed{42}. The answer is boxed above", "42", 1.0),
        (r"<think>\boxed{3}</think> It is 4", "4", 1.0),
        (r"<think>\boxed{3}</think> It is 4", "3", 0.0),
        ("7 + 5 = 12.", "12", 1.0),
        ("The answer is 73, as 70 + 3 = 73 shows in 2 ways", "73", 1.0),
        ("**Final Answer**\n\n" + r"\(\frac{2}{4}\)", "1/2", 1.0),
        ("Let us see.\n#### 42", "42", 1.0),
        ("#### Step 3 of 4\nresult 7", "7", 1.0),
        ("so it is " + r"\frac{1}{2}.", "0.5", 1.0),
        ("Thus:\n" + r"2\sqrt{3}+1", r"1+\sqrt{12}", 1.0),
        ("I paid $18.", "18", 1.0),
        ("It was -5 degrees", "-5", 1.0),
        ("10-5=5", "5", 1.0),
        ("the point (1, 2).", "(1,2)", 1.0),
        ("the point (2, 1).", "(1,2)", 0.0),
        ("1e3", "1000", 1.0),
        ("1 234", "1234", 1.0),
        (r"\boxed{1\,234}", "1234", 1.0),
        (r"\boxed{5 dollars}", "5", 1.0),
        (r"50\%", "50", 1.0),
        ("0.333333", "1/3", 1.0),
        ("1, 2", "2, 1", 1.0),
        ("E: the dog", "E", 1.0),
        ("E: the dog", "D", 0.0),
        (r"\boxed{(E)}", "E", 1.0),
        ("Monday", "monday", 1.0),
        ("It rains.\nThe answer is **Monday**.", "Monday", 1.0),
        (r"Not Tuesday but \boxed{\text{Monday}}", "Monday", 1.0),
        ("Tuesday", "Monday", 0.0),
        (r"\boxed{dayMon}", "Monday", 0.0),
        ("x=5", "y=5", 0.0),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        ("", "5", 0.0),
        ("I do not know", "5", 0.0),
        ("5", 5, 1.0),
        ("0.5", 0.5, 1.0),
        ("#### 42", "Long text.\n#### 42", 1.0),
        ("42", r"So $x = \boxed{42}$.", 1.0),
        ("((((((((((" * 100, "5", 0.0),
        ("5\ud800", "5", 1.0),
    ],
)
def test_which_part_counts_and_what_is_equal(answer, label, reward):
    assert math_reward(answer, label) == reward


def test_documented_table_holds():
    """Every row of the table in the module's docstring, cell by cell."""
    from limes.rewards import maths

    rows = [line.split("|")[1:4] for line in maths.__doc__.splitlines() if line.startswith("| `")]
    cells = [(a.split("`")[1::2], g.split("`")[1::2], float(r)) for a, g, r in rows if "`" in g]
    assert len(cells) >= 15
    for answers, labels, reward in cells:
        for answer in answers:
            for label in labels:
                assert math_reward(answer, label) == reward, (answer, label)


def test_nothing_is_left_in_the_working_folder():
    assert not Path("pwned").exists()
