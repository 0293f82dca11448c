"""Proofs that a piece of maths keeps a property: each takes an implementation and fails where it does not.

They are functions, so that they run on the right implementation and on ones with a known fault.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

POISONS = (float("nan"), 1e9, float("-inf"))


@dataclass
class Batch:
    """A packed float64 batch; every field but `lengths` is `[num_tokens]`."""

    log_probs: Tensor
    old_log_probs: Tensor
    rollout_log_probs: Tensor
    ref_log_probs: Tensor
    entropy: Tensor
    advantages: Tensor
    mask: Tensor
    lengths: list[int]

    def take(self, sequences: list[int]) -> Batch:
        """The batch of these sequences, in this order."""
        starts = [sum(self.lengths[:i]) for i in range(len(self.lengths))]
        index = torch.tensor([starts[i] + t for i in sequences for t in range(self.lengths[i])], dtype=torch.int64)
        tensors = {f.name: getattr(self, f.name)[index] for f in fields(self) if f.name != "lengths"}
        return Batch(**tensors, lengths=[self.lengths[i] for i in sequences])

    def poisoned(self, poison: float, names: tuple[str, ...]) -> Batch:
        """The same batch with `poison` under the mask of the named fields."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in names:
            tensors[name] = torch.where(self.mask != 0, tensors[name].detach(), poison)
        return Batch(**tensors)


def random_batch(seed: int, lengths: list[int] | None = None) -> Batch:
    """Ratios reach both sides of a clip; some tokens, and the last sequence, are masked out."""
    generator = torch.Generator().manual_seed(seed)
    lengths = lengths or [3, 7, 1, 5, 2, 6, 4]
    num = sum(lengths)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(num, generator=generator, dtype=torch.float64)

    old = -normal(1.0).abs() - 0.1
    mask = (torch.rand(num, generator=generator) < 0.7).double()
    mask[0] = 1
    mask[num - lengths[-1] :] = 0
    return Batch(
        log_probs=old + normal(0.3),
        old_log_probs=old,
        rollout_log_probs=old + normal(0.4),
        ref_log_probs=old + normal(0.5),
        entropy=normal(1.0).abs(),
        advantages=normal(1.0),
        mask=mask,
        lengths=lengths,
    )


def random_cut(num_sequences: int, rng: random.Random) -> list[list[list[int]]]:
    """Ranks x micro-batches x sequences, in random order; a rank may be empty."""
    order = list(range(num_sequences))
    rng.shuffle(order)
    ranks: list[list[list[int]]] = [[] for _ in range(rng.randint(1, 3))]
    while order:
        size = rng.randint(1, len(order))
        rng.choice(ranks).append([order.pop() for _ in range(size)])
    return ranks


StepLoss = Callable[[list[list[Batch]]], Tensor]


def prove_cut_invariance(
    step_loss: StepLoss, batch: Batch, *, cuts: int = 20, tolerance: float = 1e-10
) -> tuple[float, Tensor]:
    """P1: the loss of an optimizer step and its gradient are the same for any ranks x micro-batches x packing order.

    Returns the loss and gradient of the whole.
    """
    whole, gradient = loss_and_gradient(step_loss, batch)
    rng = random.Random(0)
    for _ in range(cuts):
        cut = random_cut(len(batch.lengths), rng)
        loss, slope = loss_and_gradient(step_loss, batch, cut)
        assert abs(loss - whole) <= tolerance, f"cut {cut}: loss {loss}, whole {whole}"
        worst = float((slope - gradient).abs().max())
        assert worst <= tolerance, f"cut {cut}: gradient differs by {worst}"
    return whole, gradient


def loss_and_gradient(
    step_loss: StepLoss, batch: Batch, cut: list[list[list[int]]] | None = None
) -> tuple[float, Tensor]:
    """Of a step that is cut like this; None is one micro-batch of everything."""
    cut = cut if cut is not None else [[list(range(len(batch.lengths)))]]
    leaf = batch.log_probs.detach().clone().requires_grad_()
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
    live = Batch(**{**tensors, "log_probs": leaf})
    loss = step_loss([[live.take(sequences) for sequences in rank] for rank in cut])
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.item(), gradient


def prove_mask_silence(
    function: Callable[..., Tensor], inputs: Mapping[str, Tensor], mask: Tensor, *, differentiable: tuple[str, ...] = ()
) -> None:
    """P2: no poison under the mask of any input changes a bit of the result or of a gradient; gradients there are 0."""
    clean, clean_gradients = _run(function, inputs, differentiable)
    assert bool(clean.isfinite().all())
    for gradient in clean_gradients:
        assert bool((gradient[mask == 0] == 0).all()), "a gradient passes under the mask"
    for name in inputs:
        for poison in POISONS:
            tainted = {**inputs, name: _taint(inputs[name], mask, poison)}
            result, gradients = _run(function, tainted, differentiable)
            assert torch.equal(result, clean), f"{poison} under the mask of {name} changes the result"
            for gradient, expected in zip(gradients, clean_gradients, strict=True):
                assert torch.equal(gradient, expected), f"{poison} under the mask of {name} changes a gradient"


def _taint(values: Tensor, mask: Tensor, poison: float) -> Tensor:
    away = (mask == 0).reshape(-1, *[1] * (values.dim() - 1))
    return torch.where(away, torch.full_like(values, poison), values)


def _run(
    function: Callable[..., Tensor], inputs: Mapping[str, Tensor], differentiable: tuple[str, ...]
) -> tuple[Tensor, list[Tensor]]:
    leaves = {
        name: value.detach().clone().requires_grad_(name in differentiable) if value.is_floating_point() else value
        for name, value in inputs.items()
    }
    result = function(**leaves)
    if not differentiable:
        return result, []
    return result.detach(), list(torch.autograd.grad(result.sum(), [leaves[name] for name in differentiable]))


def prove_ids_decide(estimator: Callable[[Tensor, Tensor], Tensor]) -> None:
    """P3: advantages depend on group ids alone; shuffling samples and renaming groups moves them with their samples.

    Also: a group of equal rewards between two others of other sizes gets exact zeros.
    """
    rewards = torch.tensor([1.0, 2, 3, 4, 5, 5, 5, 1, 1, 0, 0], dtype=torch.float64)
    ids = torch.tensor([0] * 4 + [1] * 3 + [2] * 4)
    expected = estimator(rewards, ids)
    assert bool((expected[4:7] == 0).all()), "equal rewards, yet not 0"
    for seed in range(10):
        order = torch.randperm(11, generator=torch.Generator().manual_seed(seed))
        renamed = torch.tensor([7, -3, 100])[ids][order]
        assert torch.equal(estimator(rewards[order], renamed), expected[order]), f"order {order.tolist()}"


def prove_equal_rewards_are_zero(estimator: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A group of equal float32 rewards gets exact zeros, whatever the reward and the size of the group."""
    for size in range(2, 12):
        for reward in (0.1, 0.3, 0.7, 1 / 3, 0.95):
            result = estimator(torch.full((size,), reward), torch.zeros(size, dtype=torch.int64))
            assert bool((result == 0).all()), f"{size} equal rewards of {reward} give {result.tolist()}"


Gae = Callable[[Tensor, Tensor, list[int], Tensor], tuple[Tensor, Tensor]]


def prove_observations_do_not_exist(gae: Gae) -> None:
    """Advantages of sampled tokens are those of the sequence without its observation tokens."""
    rewards = torch.tensor([0.1, 0, 0, 0.2, 1], dtype=torch.float64)
    values = torch.tensor([0.5, 9, 9, 0.6, 0.7], dtype=torch.float64)
    mask = torch.tensor([1.0, 0, 0, 1, 1])
    chosen = mask != 0
    whole = gae(rewards, values, [5], mask)
    compressed = gae(rewards[chosen], values[chosen], [3], mask[chosen])
    for full, short in zip(whole, compressed, strict=True):
        torch.testing.assert_close(full[chosen], short, rtol=0, atol=1e-12)


LOGITS = torch.tensor([0.0, 1, 2], dtype=torch.float64)
REF_LOGITS = torch.tensor([1.0, 0, 0], dtype=torch.float64)


def expected_gradient(loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Gradient of a per-token loss by the logits, averaged over tokens sampled from the policy itself."""
    logits = LOGITS.clone().requires_grad_()
    log_probs = logits.log_softmax(-1)
    weights = log_probs.detach().exp()
    (gradient,) = torch.autograd.grad((weights * loss(log_probs, REF_LOGITS.log_softmax(-1))).sum(), logits)
    return gradient


def prove_pulls_to_reference(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """The loss's expected gradient is that of KL(policy || reference)."""
    logits = LOGITS.clone().requires_grad_()
    log_probs = logits.log_softmax(-1)
    divergence = (log_probs.exp() * (log_probs - REF_LOGITS.log_softmax(-1))).sum()
    (true,) = torch.autograd.grad(divergence, logits)
    torch.testing.assert_close(expected_gradient(loss), true, rtol=0, atol=1e-12)


def prove_on_policy_ratio_is_one(score: Callable[[Tensor, float], Tensor]) -> None:
    """What the trainer scores equals what an engine at the same temperature sampled from."""
    logits = torch.tensor([2.0, 1, 0, -1], dtype=torch.float64)
    for temperature in (0.5, 0.6, 1.0, 2.0):
        sampled_from = [
            x / temperature - math.log(sum(math.exp(y / temperature) for y in logits.tolist())) for x in logits
        ]
        ratios = (score(logits, temperature) - torch.stack([torch.as_tensor(x) for x in sampled_from])).exp()
        torch.testing.assert_close(ratios, torch.ones(4, dtype=torch.float64), rtol=0, atol=1e-12)
