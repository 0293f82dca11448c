import pytest
import torch
from torch import nn

from limes.config.trainer import TrainerConfig
from limes.training.optimizer import PolicyOptimizer
from limes.training.schedule import learning_rate


def test_narrow_parameters_keep_float32_masters_and_gradient_sums():
    """Many updates too small for bfloat16 still arrive."""
    config = TrainerConfig(lr=1e-5, clip_grad=0.0)
    narrow = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    wide = nn.Parameter(torch.ones(4, 4))
    optimizers = [PolicyOptimizer([("w", p)], config) for p in (narrow, wide)]
    for _ in range(400):
        for parameter, optimizer in zip((narrow, wide), optimizers, strict=True):
            for share in (1.0, 1e-3):  # two micro-batches
                parameter.grad = torch.full_like(parameter, share)
                optimizer.accumulate()
                if parameter is wide:
                    optimizer_sum = parameter.grad
            if parameter is wide:
                parameter.grad = optimizer_sum
            optimizer.step(1e-5)
    torch.testing.assert_close(optimizers[0].masters[0].detach(), wide.detach(), rtol=0, atol=1e-6)
    assert torch.equal(narrow, optimizers[0].masters[0].bfloat16())
    assert float(narrow.detach().mean()) < 1


def test_gradient_sums_of_narrow_parameters_do_not_round():
    parameter = nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    optimizer = PolicyOptimizer([("w", parameter)], TrainerConfig())
    for _ in range(512):
        parameter.grad = torch.full_like(parameter, 1.0)
        optimizer.accumulate()
    assert torch.equal(optimizer.masters[0].grad, torch.full((2, 2), 512.0))


def test_weight_decay_leaves_out_vectors():
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    optimizer = PolicyOptimizer([("m", matrix), ("v", vector)], TrainerConfig(weight_decay=0.5))
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step(0.1)
    assert torch.allclose(matrix, torch.full((2, 2), 0.95))
    assert torch.equal(vector, torch.ones(2))


def test_clipping_scales_the_whole_gradient():
    a, b = nn.Parameter(torch.zeros(1, 1)), nn.Parameter(torch.zeros(1))
    optimizer = PolicyOptimizer([("a", a), ("b", b)], TrainerConfig(clip_grad=1.0, lr=1.0))
    seen = []
    optimizer.adam.step = lambda: seen.append((float(a.grad), float(b.grad)))
    a.grad, b.grad = torch.tensor([[3.0]]), torch.tensor([4.0])
    assert optimizer.step(1.0) == pytest.approx(5.0)  # U124: before clipping
    assert seen == [(pytest.approx(0.6, abs=1e-4), pytest.approx(0.8, abs=1e-4))]


def test_schedules():
    def rates(**options):
        config = TrainerConfig(lr=1.0, **options)
        return [learning_rate(step, 6, config) for step in range(6)]

    assert rates() == [1.0] * 6
    assert rates(lr_warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates(lr_warmup_steps=2, lr_schedule="linear", min_lr=0.25) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert rates(lr_schedule="cosine") == pytest.approx([1.0, 0.904508, 0.654508, 0.345492, 0.095492, 0.0], abs=1e-6)
