"""Each proof holds for limes and fails on the known fault that it is there to catch."""

import math

import pytest
import torch
from maths_proofs import (
    prove_cut_invariance,
    prove_equal_rewards_are_zero,
    prove_ids_decide,
    prove_mask_silence,
    prove_observations_do_not_exist,
    prove_on_policy_ratio_is_one,
    prove_pulls_to_reference,
    random_batch,
)

from limes.algorithms import corrections, distill, kl, returns, sft, value_loss
from limes.algorithms.advantages import (
    gae,
    group_relative,
    leave_one_out,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    whiten,
)
from limes.algorithms.aggregate import AGGREGATIONS, aggregate, step_total
from limes.algorithms.objective import token_losses
from limes.algorithms.policy_loss import cispo, clipped, gspo, reinforce
from limes.models.lm_head import HeadTargets, head_log_probs


def token_loss(batch):
    return clipped(batch.log_probs, batch.old_log_probs, batch.advantages, eps_clip=0.2, mask=batch.mask)[0]


def one_step(how):
    """An optimizer step with the denominators of the whole step."""

    def step_loss(ranks):
        parts = [part for rank in ranks for part in rank]
        total = sum(step_total(p.mask, p.lengths, how) for p in parts)
        return sum(aggregate(token_loss(p), p.mask, p.lengths, how, total=total, constant=5) for p in parts)

    return step_loss


def mean_of_micro_batches(ranks):
    parts = [part for rank in ranks for part in rank]
    return sum(aggregate(token_loss(p), p.mask, p.lengths) for p in parts) / len(parts)


def mean_of_ranks(ranks):
    ranks = [rank for rank in ranks if rank]
    total = 0.0
    for rank in ranks:
        tokens = sum(step_total(p.mask, p.lengths) for p in rank)
        total = total + sum(aggregate(token_loss(p), p.mask, p.lengths, total=tokens) for p in rank) / len(ranks)
    return total


def divided_again(ranks):
    return one_step("token_mean")(ranks) / sum(len(rank) for rank in ranks)


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_p1_holds(how):
    for seed in range(3):
        prove_cut_invariance(one_step(how), random_batch(seed))


@pytest.mark.parametrize("fault", [mean_of_micro_batches, mean_of_ranks, divided_again])
def test_p1_catches(fault):
    with pytest.raises(AssertionError, match="cut"):
        prove_cut_invariance(fault, random_batch(0))


BATCH = random_batch(0)
TRIPLE = {"log_probs": BATCH.log_probs, "old_log_probs": BATCH.old_log_probs, "advantages": BATCH.advantages}
SEQUENCES = {"lengths": BATCH.lengths, "mask": BATCH.mask}
TOPK = {
    name: -torch.rand(BATCH.mask.numel(), 3, generator=torch.Generator().manual_seed(i), dtype=torch.float64) - 1.2
    for i, name in enumerate(("student_log_probs", "teacher_log_probs", "old_log_probs"))
}
IDS = {"student_ids": torch.arange(3).repeat(28, 1), "teacher_ids": torch.tensor([0, 2, 5]).repeat(28, 1)}
PAIR = {"trainer_log_probs": BATCH.log_probs, "rollout_log_probs": BATCH.rollout_log_probs}
REWARDS = torch.randn(7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
GROUPS = [0, 0, 0, 0, 1, 1, 1]


def aggregated(how):
    return lambda losses: aggregate(losses, BATCH.mask, BATCH.lengths, how, constant=4)


SILENT = {
    **{f"aggregate {how}": (aggregated(how), {"losses": BATCH.log_probs}, ("losses",)) for how in AGGREGATIONS},
    "clipped": (lambda **x: clipped(**x, eps_clip=0.2, eps_clip_c=3.0, mask=BATCH.mask)[0], TRIPLE, ("log_probs",)),
    "decoupled": (
        lambda **x: clipped(**x, eps_clip=0.2, mask=BATCH.mask)[0],
        TRIPLE | {"proximal_log_probs": BATCH.rollout_log_probs},
        ("log_probs",),
    ),
    "gspo": (lambda **x: gspo(**x, **SEQUENCES, eps_clip=0.2)[0], TRIPLE, ("log_probs",)),
    "cispo": (lambda **x: cispo(**x, eps_clip=0.2, mask=BATCH.mask)[0], TRIPLE, ("log_probs",)),
    "reinforce": (lambda **x: reinforce(**x, mask=BATCH.mask)[0], TRIPLE, ("log_probs",)),
    **{
        f"kl {kind}": (
            lambda kind=kind, **x: kl.penalty(**x, kind=kind, mask=BATCH.mask),
            {
                "log_probs": BATCH.log_probs,
                "ref_log_probs": BATCH.ref_log_probs,
                "old_log_probs": BATCH.old_log_probs,
            },
            ("log_probs",),
        )
        for kind in kl.KINDS
    },
    **{
        f"{correct.__name__} {level}": (
            lambda correct=correct, level=level, **x: correct(**x, low=0.7, high=1.4, level=level, **SEQUENCES)[0],
            PAIR,
            (),
        )
        for correct in (corrections.truncated_importance, corrections.masked_importance)
        for level in ("token", "sequence", "geometric")
    },
    "opsm": (
        lambda **x: corrections.off_policy_sequence_mask(**x, delta=0.05, **SEQUENCES)[0],
        TRIPLE,
        (),
    ),
    "topk_loss": (
        lambda **x: distill.topk_loss(**x, **IDS, support="overlap", mask=BATCH.mask)[0],
        {name: TOPK[name] for name in ("student_log_probs", "teacher_log_probs")},
        ("student_log_probs",),
    ),
    "topk_surrogate": (
        lambda **x: distill.topk_surrogate(**x, **IDS, support="overlap", eps_clip=0.2, mask=BATCH.mask)[0],
        TOPK,
        ("student_log_probs",),
    ),
    "distillation term": (
        lambda **x: distill.advantage_term(**x, mask=BATCH.mask),
        {"old_log_probs": BATCH.old_log_probs, "teacher_log_probs": BATCH.ref_log_probs},
        (),
    ),
    "value loss": (
        lambda **x: value_loss.clipped(**x, value_clip=0.2, mask=BATCH.mask)[0],
        {"values": BATCH.log_probs, "old_values": BATCH.old_log_probs, "returns": BATCH.advantages},
        ("values",),
    ),
    "sft": (
        lambda **x: sft.negative_log_likelihood(**x, mask=BATCH.mask)[0],
        {"log_probs": BATCH.log_probs, "weights": BATCH.entropy},
        ("log_probs",),
    ),
    "whiten": (lambda **x: whiten(**x, mask=BATCH.mask), {"values": BATCH.advantages}, ()),
    "gae": (
        lambda **x: torch.cat(gae(**x, **SEQUENCES, gamma=0.9, lambd=0.9)),
        {"token_rewards": BATCH.advantages, "values": BATCH.log_probs},
        (),
    ),
    "returns": (
        lambda **x: returns.discounted_returns(**x, **SEQUENCES, gamma=0.9),
        {"token_rewards": BATCH.advantages},
        (),
    ),
    "reinforce++": (
        lambda **x: reinforce_plus_plus(REWARDS, **x, **SEQUENCES, kl_coef=0.1, gamma=0.9),
        {"kl": BATCH.advantages},
        (),
    ),
    "reinforce++ baseline": (
        lambda **x: reinforce_plus_plus_baseline(REWARDS, GROUPS, **x, **SEQUENCES, kl_coef=0.1),
        {"kl": BATCH.advantages},
        (),
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_p2_holds(name):
    function, inputs, differentiable = SILENT[name]
    prove_mask_silence(function, inputs, BATCH.mask, differentiable=differentiable)


def aggregate_by_multiplication(losses):
    return (losses * BATCH.mask).sum() / BATCH.mask.sum()


def loss_masked_only_at_the_end(**inputs):
    """Right values, yet the gradient of a poisoned token is 0 x NaN."""
    return torch.where(BATCH.mask != 0, clipped(**inputs, eps_clip=0.2)[0], 0.0)


def whiten_by_multiplication(values):
    mean = (values * BATCH.mask).sum() / BATCH.mask.sum()
    return (values - mean) * BATCH.mask


def gae_over_padding(token_rewards, values):
    next_values = torch.cat([values[1:], values[:1]])
    return torch.where(BATCH.mask != 0, token_rewards + next_values - values, 0.0)


@pytest.mark.parametrize(
    ("fault", "inputs", "differentiable"),
    [
        (aggregate_by_multiplication, {"losses": BATCH.log_probs}, ("losses",)),
        (loss_masked_only_at_the_end, TRIPLE, ("log_probs",)),
        (whiten_by_multiplication, {"values": BATCH.advantages}, ()),
        (gae_over_padding, {"token_rewards": BATCH.advantages, "values": BATCH.log_probs}, ()),
    ],
)
def test_p2_catches(fault, inputs, differentiable):
    with pytest.raises(AssertionError, match="under the mask"):
        prove_mask_silence(fault, inputs, BATCH.mask, differentiable=differentiable)


def one_global_mean(rewards, ids):
    return rewards - rewards.mean()


def groups_by_position(rewards, ids):
    rows = [rewards[:4], rewards[4:7], rewards[7:]]
    return torch.cat([row - row.mean() for row in rows])


def test_p3_holds():
    for std in ("sample", "population", "none"):
        prove_ids_decide(lambda rewards, ids, std=std: group_relative(rewards, ids, std=std))
    prove_ids_decide(leave_one_out)


@pytest.mark.parametrize("fault", [one_global_mean, groups_by_position])
def test_p3_catches(fault):
    with pytest.raises(AssertionError, match=r"not 0|order"):
        prove_ids_decide(fault)


def small_spread_counts_as_equal(rewards, ids):
    """In the rewards' own float32, as `if std > 0`: seven times 0.7 has a residue."""
    centred = rewards - rewards.mean()
    std = centred.square().mean().sqrt()
    return centred / (std + 1e-6) if std > 0 else torch.zeros_like(rewards)


def test_u16_equality_holds_and_a_spread_above_zero_is_caught():
    for std in ("sample", "population", "none"):
        prove_equal_rewards_are_zero(lambda rewards, ids, std=std: group_relative(rewards, ids, std=std))
    prove_equal_rewards_are_zero(leave_one_out)
    with pytest.raises(AssertionError, match="equal rewards"):
        prove_equal_rewards_are_zero(small_spread_counts_as_equal)


def test_gae_holds_and_the_walk_through_observations_is_caught():
    prove_observations_do_not_exist(lambda r, v, n, m: gae(r, v, n, m, gamma=0.9, lambd=0.95))
    with pytest.raises(AssertionError):
        prove_observations_do_not_exist(lambda r, v, n, m: gae(r, v, n, torch.ones_like(m), gamma=0.9, lambd=0.95))


def test_kl_loss_holds_and_k1_and_k3_are_caught():
    prove_pulls_to_reference(lambda x, ref: kl.penalty(x, ref, "k2"))
    prove_pulls_to_reference(lambda x, ref: kl.penalty(x, ref, "k3", old_log_probs=x.detach()))
    for kind in ("k1", "k3"):
        with pytest.raises(AssertionError):
            prove_pulls_to_reference(lambda x, ref, kind=kind: kl.penalty(x, ref, kind))
    with pytest.raises(AssertionError):
        prove_pulls_to_reference(lambda x, ref: kl.penalty(x.detach(), ref, "k2") + 0 * x)


def trainer_scores(logits, temperature):
    """Log-probs of all tokens by the head that the trainer scores with."""
    every = torch.arange(len(logits))
    targets = HeadTargets(row_M=torch.zeros_like(every), token_M=every, offsets=[0, len(logits)])
    identity = torch.eye(len(logits), dtype=logits.dtype)
    return head_log_probs(logits[None], identity, targets, temperature=temperature)[0]


def test_t10_temperature_on_both_sides_holds_and_on_one_is_caught():
    prove_on_policy_ratio_is_one(trainer_scores)
    with pytest.raises(AssertionError):
        prove_on_policy_ratio_is_one(lambda logits, temperature: trainer_scores(logits, 1.0))


def test_t10_the_size_of_that_fault():
    logits = torch.tensor([2.0, 1, 0, -1], dtype=torch.float64)
    trainer, engine = (logits / 0.6).log_softmax(-1), logits.log_softmax(-1)
    zeros = torch.zeros(4, dtype=torch.float64)
    _, metrics = clipped(trainer, engine, zeros, eps_clip=0.2)
    assert metrics["ratio"].tolist() == pytest.approx(
        [1.2612827941, 0.6475641784, 0.3324705349, 0.1706960642], abs=1e-10
    )


def test_u12_the_logged_loss_is_the_one_whose_gradient_was_taken():
    leaf = BATCH.log_probs.clone().requires_grad_()
    losses, _ = clipped(leaf, BATCH.old_log_probs, BATCH.advantages, eps_clip=0.2, mask=BATCH.mask)
    loss = aggregate(losses, BATCH.mask, BATCH.lengths)
    chosen = [x for x, m in zip(losses.tolist(), BATCH.mask.tolist(), strict=True) if m]
    assert loss.item() == pytest.approx(math.fsum(chosen) / len(chosen), abs=1e-12)


def test_u05_a_loss_of_ones_own_counts_like_a_built_in_one():
    def own(log_probs, old_log_probs, advantages, *, lengths, mask, scale):
        return torch.where(mask != 0, -scale * advantages * log_probs, 0.0), {}

    def gradient(loss_of, **settings):
        leaf = BATCH.log_probs.clone().requires_grad_()
        arguments = leaf, BATCH.old_log_probs, BATCH.advantages
        losses, _ = token_losses(*arguments, **SEQUENCES, policy_loss=loss_of, settings=settings)
        return torch.autograd.grad(aggregate(losses, BATCH.mask, BATCH.lengths), leaf)[0]

    assert torch.equal(gradient(own, scale=1.0), gradient("reinforce"))
