from __future__ import annotations

import asyncio
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reward_cases import answered

from limes.rewards import Grade, scalar_reward
from limes.rewards.function import FunctionGrader
from limes.rewards.grade import LARGEST

GARBAGE = [
    math.nan,
    math.inf,
    -math.inf,
    "1.0",
    b"1",
    [1.0],
    (1.0,),
    Ellipsis,
    np.array([1.0]),
    np.str_("1"),
    np.float32("nan"),
    torch.tensor([1.0]),
    torch.tensor(math.inf),
    1 + 2j,
    10**400,
    1e39,
    -1e308,
    {},
    {"other": 1.0},
    {"score": "1"},
    {"score": {"score": 1.0}},
]
NUMBERS = [
    (1, 1.0),
    (0.5, 0.5),
    (True, 1.0),
    (False, 0.0),
    (-2, -2.0),
    (np.float32(0.5), 0.5),
    (np.float64(0.5), 0.5),
    (np.int64(3), 3.0),
    (np.bool_(True), 1.0),
    (np.array(0.25), 0.25),
    (torch.tensor(0.5), 0.5),
    (torch.tensor(3), 3.0),
    (torch.tensor(True), 1.0),
    (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), 0.5),
    (Fraction(1, 4), 0.25),
]


@pytest.mark.parametrize(("reward", "number"), NUMBERS)
def test_numbers(reward, number):
    for given_reward in (reward, {"score": reward}):
        found = scalar_reward(given_reward)
        assert found == number
        assert type(found) is float


@pytest.mark.parametrize("reward", GARBAGE, ids=repr)
def test_garbage_is_never_a_number(reward):
    with pytest.raises(ValueError, match="reward"):
        scalar_reward(reward)


def test_none_and_keys():
    assert scalar_reward(None) is None
    assert scalar_reward({"score": None}) is None
    assert scalar_reward({"score": 1, "format": 0.5}, "format") == 0.5
    assert scalar_reward(0.5, "format") == 0.5
    with pytest.raises(ValueError, match=r"no entry 'formt', only 'score'.*reward\.key"):
        scalar_reward({"score": 1}, "formt")


@given(st.floats(-LARGEST, LARGEST))
def test_every_float_of_a_sane_size_is_kept(value):
    assert scalar_reward(value) == value
    assert scalar_reward({"mine": value}, "mine") == value


def test_u117_unscored_is_not_zero():
    """[1, None, {"score": 0}]: one of three is unscored, the mean is over two."""
    returned = iter([1, None, {"score": 0}])
    grader = FunctionGrader(lambda sample: next(returned), name="mixed")

    async def run():
        return [(await grader.grade([answered("")]))[0] for _ in range(3)]

    grades = asyncio.run(run())
    assert grades == [Grade(1.0), Grade(None), Grade({"score": 0})]
    assert [scalar_reward(grade.reward) for grade in grades] == [1.0, None, 0.0]


@pytest.mark.parametrize("reward", GARBAGE, ids=repr)
def test_garbage_of_a_grader_is_an_error_and_costs_only_its_sample(reward):
    grader = FunctionGrader(lambda sample: reward if sample.response == "bad" else 1.0, name="odd")
    bad, good = asyncio.run(grader.grade([answered("bad"), answered("good")]))
    assert bad.reward is None
    assert bad.error.startswith("ValueError: ")
    assert good == Grade(1.0)


def test_dict_rewards_keep_their_parts_as_plain_numbers():
    grader = FunctionGrader(lambda sample: {"score": torch.tensor(0.5), "why": "x", "n": np.int64(2)}, name="parts")
    (grade,) = asyncio.run(grader.grade([answered("")]))
    assert grade == Grade({"score": 0.5, "why": "x", "n": 2})
    assert type(grade.reward["n"]) is int
    assert type(grade.reward["score"]) is float
