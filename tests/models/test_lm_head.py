import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from limes.models.lm_head import HeadTargets, head_log_probs

T10 = [2.0, 1.0, 0.0, -1.0]


def targets_of(tokens_of_rows):
    """Targets from the token ids that follow each hidden row."""
    rows = [row for row, tokens in enumerate(tokens_of_rows) for _ in tokens]
    offsets = [0]
    for tokens in tokens_of_rows:
        offsets.append(offsets[-1] + len(tokens))
    tokens = [token for tokens in tokens_of_rows for token in tokens]
    return HeadTargets(torch.tensor(rows, dtype=torch.int64), torch.tensor(tokens, dtype=torch.int64), offsets)


def plain(hidden, weight, targets, temperature):
    log_p = torch.log_softmax(hidden @ weight.T / temperature, -1)
    return log_p[targets.row_M, targets.token_M], -(log_p.exp() * log_p).sum(-1)


def random_case(seed, tokens_of_rows, *, vocab=11, width=5, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(len(tokens_of_rows), width, generator=generator, dtype=torch.float64) * scale
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets_of(tokens_of_rows)


ROWS = st.lists(st.lists(st.integers(0, 10), max_size=4), min_size=1, max_size=8)


@settings(max_examples=80, deadline=None)
@given(
    tokens=ROWS,
    seed=st.integers(0, 1000),
    chunk=st.integers(1, 9),
    temperature=st.sampled_from([0.3, 0.6, 1.0, 1.7]),
    entropy_grad=st.booleans(),
)
def test_values_and_gradients_equal_the_plain_formula(tokens, seed, chunk, temperature, entropy_grad):
    """Several tokens a row, the same token twice, rows without any; both outputs weigh in the loss."""
    hidden, weight, targets = random_case(seed, tokens)
    expected = plain(hidden, weight, targets, temperature)
    got = head_log_probs(hidden, weight, targets, temperature=temperature, chunk=chunk, entropy_grad=entropy_grad)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    slopes = [torch.linspace(-1, 2, len(x), dtype=torch.float64) for x in expected]
    used = slice(None) if entropy_grad else slice(1)

    def gradients(outputs):
        loss = sum((x * slope).sum() for x, slope in zip(outputs[used], slopes[used], strict=True))
        return torch.autograd.grad(loss, [hidden, weight])

    for a, b in zip(gradients(got), gradients(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_gradcheck(chunk, temperature):
    hidden, weight, targets = random_case(3, [[1, 4, 4], [], [7], [0, 10]])

    def both(hidden, weight):
        return head_log_probs(hidden, weight, targets, temperature=temperature, chunk=chunk, entropy_grad=True)

    assert torch.autograd.gradcheck(both, (hidden, weight), nondet_tol=1e-12)


def test_entropy_alone_has_a_gradient_where_it_is_wanted():
    hidden, weight, targets = random_case(5, [[1], [2]])
    _, entropy = head_log_probs(hidden, weight, targets, entropy_grad=True)
    _, expected = plain(hidden, weight, targets, 1.0)
    for a, b in zip(
        torch.autograd.grad(entropy.sum(), [hidden, weight]),
        torch.autograd.grad(expected.sum(), [hidden, weight]),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    assert not head_log_probs(hidden, weight, targets)[1].requires_grad


@pytest.mark.parametrize(
    ("temperature", "first", "third", "entropy"),
    [
        (1.0, -0.4401896986, -2.4401896986, 0.9475369640),
        (0.5, -0.1450779390, -4.1450779390, 0.4554286229),
        (2.0, -0.7873386717, -1.7873386717, 1.2450504275),
        (0.6, -0.2080604050, -3.5413937383, 0.5876595653),
    ],
)
def test_temperature_shapes_log_probs_and_entropy(temperature, first, third, entropy):
    hidden = torch.ones(1, 1, dtype=torch.float64)
    weight = torch.tensor(T10, dtype=torch.float64)[:, None]
    log_probs, entropies = head_log_probs(hidden, weight, targets_of([[0, 2]]), temperature=temperature)
    assert log_probs.tolist() == pytest.approx([first, third], abs=1e-9)
    assert entropies.tolist() == pytest.approx([entropy], abs=1e-9)


@pytest.mark.parametrize(
    ("temperature", "gradient"),
    [
        (1.0, [0.3560857401, -0.2368828181, -0.0871443187, -0.0320586033]),
        (0.5, [0.2700902464, -0.2341178265, -0.0316844024, -0.0042880176]),
    ],
)
def test_gradient_with_respect_to_the_logits(temperature, gradient):
    weight = torch.tensor(T10, dtype=torch.float64)[:, None].requires_grad_()
    log_probs, _ = head_log_probs(
        torch.ones(1, 1, dtype=torch.float64), weight, targets_of([[0]]), temperature=temperature
    )
    log_probs.sum().backward()
    assert weight.grad[:, 0].tolist() == pytest.approx(gradient, abs=1e-9)


def test_float32_log_probs_are_never_above_zero_and_keep_their_digits_behind_a_large_peak():
    hidden = torch.tensor([[1000.0], [300.0], [1.0]])
    weight = torch.tensor([[1.0], [0.999], [-1.0]])
    log_probs, entropies = head_log_probs(hidden, weight, targets_of([[0], [0, 1], [0]]), chunk=2)
    expected, _ = plain(hidden.double(), weight.double(), targets_of([[0], [0, 1], [0]]), 1.0)
    assert (log_probs <= 0).all()
    assert (entropies >= 0).all()
    # the products themselves are rounded to float32, which moves a difference of 0.3 by 3e-5
    assert log_probs.tolist() == pytest.approx(expected.tolist(), abs=1e-4)
    sure, _ = head_log_probs(torch.tensor([[1000.0]]), torch.tensor([[1.0], [0.9921875]]), targets_of([[0]]))
    assert sure.item() == pytest.approx(-math.log1p(math.exp(-7.8125)), rel=1e-3)


def test_bfloat16_input_gives_float32_outputs_and_bfloat16_gradients():
    tokens = [[1, 4], [7], [0, 10, 3]]
    hidden, weight, targets = random_case(7, tokens, dtype=torch.bfloat16)
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    log_probs, entropies = head_log_probs(hidden, weight, targets, temperature=0.7, chunk=2, entropy_grad=True)
    expected, expected_entropy = plain(exact_hidden, exact_weight, targets, 0.7)
    assert log_probs.dtype == entropies.dtype == torch.float32
    assert (log_probs <= 0).all()
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=0.1)
    (log_probs.sum() + entropies.sum()).backward()
    (expected.sum() + expected_entropy.sum()).backward()
    for a, b in ((hidden.grad, exact_hidden.grad), (weight.grad, exact_weight.grad)):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a.double(), b, rtol=0.1, atol=0.1)


def test_small_gradients_of_many_chunks_add_up_in_bfloat16():
    """Each chunk adds a thousandth of what is there, below half a step of bfloat16."""
    num = 1024
    hidden = torch.ones(num, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    log_probs, _ = head_log_probs(hidden, weight, targets_of([[0]] * num), chunk=1)
    log_probs.sum().backward()
    assert weight.grad[:, 0].tolist() == [num / 2, -num / 2]


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_probabilities_sum_to_one(chunk):
    hidden, weight, targets = random_case(9, [list(range(11))] * 3, dtype=torch.float32, scale=8.0)
    log_probs, _ = head_log_probs(hidden, weight, targets, chunk=chunk)
    torch.testing.assert_close(log_probs.view(3, 11).exp().sum(-1), torch.ones(3), rtol=0, atol=1e-5)


def test_nothing_to_score():
    hidden, weight, targets = random_case(1, [[], []])
    log_probs, entropies = head_log_probs(hidden, weight, targets, chunk=1)
    assert log_probs.shape == (0,)
    assert entropies.shape == (2,)
    log_probs.sum().backward()
    assert not hidden.grad.any()
    none = HeadTargets(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), [0])
    log_probs, entropies = head_log_probs(hidden[:0], weight, none)
    assert log_probs.shape == entropies.shape == (0,)


def test_no_more_than_a_chunk_of_logits_exists_at_once(monkeypatch):
    sizes = []

    def counted(hidden, weight):
        sizes.append(hidden.shape[0])
        return hidden @ weight.T

    monkeypatch.setattr("limes.models.lm_head.head_logits", counted)
    hidden, weight, targets = random_case(2, [[1]] * 10)
    head_log_probs(hidden, weight, targets, chunk=4)[0].sum().backward()
    assert sizes == [4, 4, 2, 4, 4]  # the last chunk is kept for the backward pass


@pytest.mark.parametrize(
    ("rows", "offsets"), [([1, 0], [0, 1, 2]), ([0, 0], [0, 1, 2]), ([0, 1], [0, 2, 2]), ([0, 1, 0], [0, 2, 3])]
)
def test_unsorted_or_miscounted_targets_are_refused(rows, offsets):
    with pytest.raises(AssertionError):
        HeadTargets(torch.tensor(rows), torch.zeros(len(rows), dtype=torch.int64), offsets)


def test_targets_of_other_rows_are_refused():
    hidden, weight, _ = random_case(1, [[1], [2]])
    with pytest.raises(AssertionError):
        head_log_probs(hidden, weight, targets_of([[1]]))
