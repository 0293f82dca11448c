from __future__ import annotations

import asyncio

import pytest
from reward_cases import answered

from limes.config.reward import RewardConfig, RewardTerm
from limes.rewards import Grade, build_grader, scalar_reward
from limes.rewards.build import KINDS, term_names

MODULE = """
from limes.rewards import math_reward

def constant(sample, *, value=1.0):
    return value

def parts(sample):
    return {"score": 0.5, "style": 2}

def unsure(sample):
    return None if sample.response == "?" else 1.0

def broken(sample):
    raise KeyError(sample.response)

def nan(sample):
    return float("nan") if sample.response == "?" else 1.0

def maths(sample):
    return math_reward(sample.response, sample.label)

def best(samples):
    longest = max(len(sample.response) for sample in samples)
    return [float(len(sample.response) == longest) for sample in samples]
"""


@pytest.fixture(autouse=True)
def user_module(tmp_path, monkeypatch):
    (tmp_path / "reward_functions_of_a_user.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def mine(name: str) -> str:
    return f"reward_functions_of_a_user:{name}"


def grade(config: RewardConfig, samples) -> list[Grade]:
    async def run():
        grader = build_grader(config)
        found = await grader.grade(samples)
        await grader.close()
        await grader.close()
        return found

    return asyncio.run(run())


def summed(*kinds, **fields) -> RewardConfig:
    return RewardConfig(terms=[RewardTerm(kind=kind, weight=weight) for kind, weight in kinds], **fields)


@pytest.mark.parametrize(
    ("kind", "options", "right", "wrong", "label"),
    [
        ("math", {}, r"\boxed{\frac{1}{2}}", "1/3", r"\frac12"),
        ("exact", {"ignore_case": True}, "paris", "rome", "Paris"),
        ("regex", {"pattern": r"=\s*(\d+)"}, "2+3 = 5", "2+3 = 6", 5),
        ("regex", {"pattern": r"^<a>"}, "<a>5", "5<a>", None),
        ("choice", {"letters": "ABC"}, "(B)", "(A)", "B"),
        ("f1", {}, "the cat", "a dog", "cat"),
        ("last_integer", {}, "it is 5", "it is 6", 5),
        ("reward_functions_of_a_user:maths", {}, r"\boxed{\frac{1}{2}}", r"\boxed{\frac13}", r"\frac12"),
    ],
)
def test_each_kind_by_name(kind, options, right, wrong, label):
    found = grade(RewardConfig(kind=kind, options=options), [answered(right, label), answered(wrong, label)])
    assert found == [Grade(1.0), Grade(0.0)]


def test_every_kind_is_named_in_the_settings():
    documented = RewardConfig.model_fields["kind"].description
    assert all(f"`{kind}`" in documented for kind in KINDS)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RewardConfig(kind="maths"), r"reward\.kind = 'maths' is not a grader; did you mean 'math'\?"),
        (RewardConfig(kind="xyzzy"), r"there are math, exact, regex"),
        (RewardConfig(kind="my.module.score"), "written module:function"),
        (RewardConfig(kind="regex"), r"reward\.options\.pattern: Field required"),
        (
            RewardConfig(kind="regex", options={"patern": "x"}),
            r"reward\.options\.patern is no option of 'regex'; did you mean 'pattern'",
        ),
        (
            RewardConfig(kind="regex", options={"pattern": "("}),
            r"reward\.options: pattern = '\(' is no regular expression",
        ),
        (RewardConfig(kind="f1", options={"x": 1}), r"no option of 'f1'; it takes none"),
        (RewardConfig(kind="math", options={"timeout_s": -1}), r"reward\.options\.timeout_s: .*greater than 0.*now -1"),
        (RewardConfig(kind="math", options={"timeout_s": "soon"}), r"reward\.options\.timeout_s: .*valid number"),
        (RewardConfig(kind="remote"), r"reward\.options\.url: Field required"),
        (RewardConfig(kind="remote", options={"url": "http://h", "retries": -1}), r"reward\.options\.retries"),
        (RewardConfig(kind="reasoning_gym", options={"extract": "tag"}), r"reward\.options\.extract: .*'last_line'"),
        (RewardConfig(kind="nobody_has_this:score"), r'reward\.kind = "nobody_has_this:score": there is no module'),
        (RewardConfig(kind=mine("constnat")), r"did you mean constant\?"),
        (
            RewardConfig(kind=mine("constant"), options={"valeu": 1}),
            r"reward\.options\.valeu is no argument.*did you mean value",
        ),
        (RewardConfig(kind="math", group=True), r"reward\.group = true needs"),
        (summed(("math", 1.0), group=True), r"reward\.group = true needs a module:function among the terms"),
        (summed(("math", 1.0), ("f_1", 1.0)), r"reward\.terms\[1\]\.kind = 'f_1' is not a grader; did you mean 'f1'"),
        (
            summed(("math", 1.0), key="mathh"),
            r"reward\.key = 'mathh' is no part of the weighted sum; did you mean 'math'",
        ),
        (RewardConfig(terms=[RewardTerm(kind="regex")]), r"reward\.terms\[0\]\.options\.pattern: Field required"),
    ],
)
def test_wrong_settings_are_named_with_their_fix(config, message):
    with pytest.raises(ValueError, match=message):
        build_grader(config)


def test_options_are_converted_as_settings_are():
    assert grade(RewardConfig(kind="exact", options={"ignore_case": "true"}), [answered("A", "a")]) == [Grade(1.0)]


def test_weighted_sum_keeps_its_parts():
    config = summed(("exact", 2.0), (mine("parts"), 0.5), ("exact", -1.0))
    (found,) = grade(config, [answered("5", "5")])
    name = mine("parts")
    assert found == Grade({"score": 1.25, "exact": 1.0, name: 0.5, f"{name}.style": 2, "exact_2": 1.0})
    assert scalar_reward(found.reward) == 1.25
    assert scalar_reward(found.reward, "exact_2") == 1.0


def test_term_names():
    assert term_names(["f1", "math", "f1", "f1"]) == ["f1", "math", "f1_2", "f1_3"]


def test_weighted_sum_trains_on_a_part_if_told_so():
    config = summed(("exact", 1.0), ("f1", 0.0), key="f1")
    (found,) = grade(config, [answered("a cat sat", "cat")])
    assert scalar_reward(found.reward, config.key) == pytest.approx(2 / 3)


def test_unscored_term_leaves_the_sample_unscored():
    config = summed((mine("constant"), 1.0), (mine("unsure"), 1.0))
    unsure, sure = grade(config, [answered("?"), answered("5")])
    assert unsure == Grade(None)
    assert sure.reward["score"] == 2.0


def test_u22_nan_of_one_term_costs_one_sample_and_names_the_term():
    config = summed((mine("constant"), 1.0), (mine("nan"), 1.0))
    bad, good = grade(config, [answered("?"), answered("5")])
    assert bad.reward is None
    assert bad.error.startswith(f"ValueError: {mine('nan')}: a reward must be a finite number")
    assert good.reward["score"] == 2.0


def test_faulty_term_gives_the_cause_first():
    (found,) = grade(summed((mine("broken"), 1.0), (mine("constant"), 1.0)), [answered("x")])
    assert found == Grade(None, f"KeyError: {mine('broken')}: 'x'")


def test_group_function_beside_sample_graders():
    config = summed((mine("best"), 1.0), ("exact", 1.0), group=True)
    samples = [answered("a", "a", group=1), answered("bb", "a", group=2), answered("aaa", "a", group=1)]
    assert [found.reward["score"] for found in grade(config, samples)] == [1.0, 1.0, 1.0]


def test_options_reach_the_function():
    assert grade(RewardConfig(kind=mine("constant"), options={"value": 0.25}), [answered("")]) == [Grade(0.25)]


def test_catastrophic_pattern_is_a_grader_error():
    config = RewardConfig(kind="regex", options={"pattern": r"(a+)+$"}, timeout_s=1)
    bad, good = grade(config, [answered("a" * 40 + "b", "a"), answered("aaa", "aaa")])
    assert bad == Grade(None, "TimedOut: no result within 1 s")
    assert good == Grade(1.0)


def test_closing_goes_on_after_a_fault():
    closed = []

    class Faulty:
        async def close(self):
            raise OSError("broken")

    class Fine:
        async def close(self):
            closed.append(self)

    from limes.rewards.combine import Term, WeightedSum

    grader = WeightedSum([Term("a", 1.0, Faulty()), Term("b", 1.0, Fine())])
    with pytest.raises(BaseExceptionGroup, match="closing graders failed"):
        asyncio.run(grader.close())
    assert len(closed) == 1
