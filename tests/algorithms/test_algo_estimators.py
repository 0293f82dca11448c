"""The table of estimators, whole and cut over ranks."""

import random

import pytest
import torch

from limes.algorithms.advantages import group_relative, leave_one_out, reinforce_plus_plus, reinforce_plus_plus_baseline
from limes.algorithms.estimators import ESTIMATORS, EstimatorInputs, EstimatorSettings, Steps, estimate
from limes.algorithms.returns import gae, shaped_rewards
from limes.algorithms.whitening import Moments, merge_moments

REWARDS = [1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 0.2]
GROUPS = [3, 8, 3, 8, 3, 8, 8]
LENGTHS = [2, 3, 1, 4, 2, 3, 2]
NUM = sum(LENGTHS)
generator = torch.Generator().manual_seed(0)
KL, VALUES = torch.randn(2, NUM, generator=generator, dtype=torch.float64)
MASK = (torch.rand(NUM, generator=generator) < 0.8).double()
MASK[[0, 2, 5, 6, 10, 12, 15]] = 1
ALL = {"lengths": LENGTHS, "mask": MASK, "kl": KL, "values": VALUES}


def inputs(**options):
    return EstimatorInputs(**({"rewards": REWARDS, "group_ids": GROUPS} | ALL | options))


def run(name, settings=None, **options):
    steps = Steps([0.5, 1, 0], [0, 2, 4], [0, 0, 0], [(0, 2), (0, 1), (0, 1)])
    return estimate(name, inputs(**({"steps": steps} | options)), settings, dtype=torch.float64)


def spread(per_sample):
    return torch.where(MASK != 0, per_sample.repeat_interleave(torch.tensor(LENGTHS)), 0.0)


def test_each_row_is_its_formula():
    settings = EstimatorSettings(kl_coef=0.1, gamma=0.99, lambd=0.95)
    outcome = torch.tensor(REWARDS, dtype=torch.float64)
    assert torch.equal(run("grpo")[0], spread(group_relative(REWARDS, GROUPS)))
    dr_grpo = run("grpo", EstimatorSettings(std="none"))[0]
    assert torch.equal(dr_grpo, spread(group_relative(REWARDS, GROUPS, std="none")))
    assert torch.equal(run("rloo")[0], spread(leave_one_out(REWARDS, GROUPS)))
    plus = reinforce_plus_plus(REWARDS, KL, LENGTHS, MASK, kl_coef=0.1, gamma=0.99)
    assert torch.equal(run("reinforce_plus_plus", settings)[0], plus)
    returns = reinforce_plus_plus(REWARDS, KL, LENGTHS, MASK, kl_coef=0.1, gamma=0.99, whiten=False)
    assert torch.equal(run("reinforce_plus_plus", settings)[1], returns)
    baseline = reinforce_plus_plus_baseline(REWARDS, GROUPS, LENGTHS, MASK, kl=KL, kl_coef=0.1)
    assert torch.equal(run("reinforce_plus_plus_baseline", settings)[0], baseline)
    token_rewards = shaped_rewards(outcome, KL, LENGTHS, MASK, kl_coef=0.1)
    expected = gae(token_rewards, VALUES, LENGTHS, MASK, gamma=0.99, lambd=0.95)
    for ours, theirs in zip(run("ppo", settings), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_kl_in_the_reward_reaches_advantages_and_returns():
    for name in ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        without, with_kl = run(name), run(name, EstimatorSettings(kl_coef=0.5))
        assert not torch.allclose(without[0], with_kl[0])
        assert not torch.allclose(without[1], with_kl[1])


def on_rank(name, settings, rank, index, merge):
    own = {"lengths": [LENGTHS[i] for i in rank], "mask": MASK[index], "kl": KL[index], "values": VALUES[index]}
    return estimate(name, inputs(**own, partition=rank), settings, merge=merge, dtype=torch.float64)


# a group's steps lie on one rank, so not step_wise
@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "step_wise"])
@pytest.mark.parametrize("normalise", [False, True])
def test_ranks_together_equal_one(name, normalise):
    kl_coef = 0.1 if ESTIMATORS[name].kl_in_reward else 0.0
    settings = EstimatorSettings(kl_coef=kl_coef, normalize_advantages=normalise)
    whole = run(name, settings)
    rng = random.Random(0)
    starts = [sum(LENGTHS[:i]) for i in range(7)]
    for _ in range(5):
        order = list(range(7))
        rng.shuffle(order)
        cut = rng.randint(0, 7)
        ranks = [order[:cut], order[cut:]]
        tokens = [[starts[i] + t for i in rank for t in range(LENGTHS[i])] for rank in ranks]
        gathered: list[Moments] = []

        def send(part, parts=gathered):
            parts.append(part)
            return part

        for rank, index in zip(ranks, tokens, strict=True):
            on_rank(name, settings, rank, index, send)
        for rank, index in zip(ranks, tokens, strict=True):
            results = on_rank(name, settings, rank, index, lambda _, parts=gathered: merge_moments(parts))
            for ours, expected in zip(results, whole, strict=True):
                torch.testing.assert_close(ours, expected[index], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_unscored_and_fully_masked_samples_are_outside_everything(name):
    mask = MASK.clone()
    mask[12:15] = 0  # all of sample 5
    rewards = [1.0, None, 0.5, 0.0, 1.0, 99.0, 0.2]
    for ours, other in zip(
        run(name, rewards=rewards, mask=mask), run(name, rewards=rewards[:5] + [-7.0, 0.2], mask=mask), strict=True
    ):
        assert torch.equal(ours, other)
        assert ours.isfinite().all()
        assert ours[2:5].eq(0).all()
        assert ours[12:15].eq(0).all()


def test_default_dtype_is_float32():
    advantages, returns = estimate("grpo", inputs())
    assert advantages.dtype == returns.dtype == torch.float32


def test_contradictions_are_refused_with_the_fix():
    with pytest.raises(ValueError, match=r"kl_coef=0.1.*kl_loss_coef"):
        run("grpo", EstimatorSettings(kl_coef=0.1))
    with pytest.raises(ValueError, match="'ppo' needs values"):
        run("ppo", values=None)
    with pytest.raises(ValueError, match="'step_wise' needs steps"):
        run("step_wise", steps=None)
    with pytest.raises(ValueError, match="did you mean 'grpo'"):
        run("gpro")
