"""Distillation against a dense float64 reference that knows the whole vocabulary."""

import itertools
import math

import pytest
import torch

from limes.algorithms.distill import advantage_term, check_same_vocabulary, topk_loss, topk_surrogate

VOCAB, TOKENS, K = 9, 6, 3
SUPPORTS, DIRECTIONS, TAILS = ("student", "teacher", "overlap"), ("reverse", "forward"), ("bin", "renormalised", "none")
CELLS = list(itertools.product(SUPPORTS, DIRECTIONS, TAILS))


def logits(seed):
    return 2 * torch.randn(TOKENS, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def top_ids(scores):
    return scores.topk(K, dim=-1).indices


def gathered(student, teacher, support):
    """What a caller hands over for a support: log-probs at the list's ids, and the lists."""
    student_ids, teacher_ids = top_ids(student.detach()), top_ids(teacher)
    ids = teacher_ids if support == "teacher" else student_ids
    at = [scores.log_softmax(-1).gather(-1, ids) for scores in (student, teacher)]
    return at, {"student_ids": student_ids, "teacher_ids": teacher_ids}


def dense(student, teacher, support, direction, tail):
    """The same quantity, token by token and outcome by outcome, in plain floats."""
    results = []
    for s, t in zip(student.softmax(-1).tolist(), teacher.softmax(-1).tolist(), strict=True):
        mine, theirs = (set(sorted(range(VOCAB), key=lambda v, p=p: -p[v])[:K]) for p in (s, t))
        chosen = {"student": mine, "teacher": theirs, "overlap": mine & theirs}[support]
        if not chosen:
            results.append(0.0)
            continue
        p, q = [s[v] for v in chosen], [t[v] for v in chosen]
        if tail == "bin":
            p, q = [*p, 1 - sum(p)], [*q, 1 - sum(q)]
        if tail == "renormalised":
            p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
        if direction == "forward":
            p, q = q, p
        results.append(sum(x * math.log(x / y) for x, y in zip(p, q, strict=True)))
    return results


@pytest.mark.parametrize(("support", "direction", "tail"), CELLS)
@pytest.mark.parametrize("seed", [0, 10, 20])
def test_every_cell_equals_the_dense_reference(support, direction, tail, seed):
    student, teacher = logits(seed), logits(seed + 1)
    (at_student, at_teacher), ids = gathered(student, teacher, support)
    loss, metrics = topk_loss(at_student, at_teacher, support=support, direction=direction, tail=tail, **ids)
    assert loss.tolist() == pytest.approx(dense(student, teacher, support, direction, tail), abs=1e-12)
    assert all(m.shape == (TOKENS,) and not m.requires_grad for m in metrics.values())


def test_some_overlaps_are_partial_and_some_empty():
    sizes = set()
    for seed in (0, 10, 20):
        (at_student, at_teacher), ids = gathered(logits(seed), logits(seed + 1), "overlap")
        sizes |= set(topk_loss(at_student, at_teacher, support="overlap", **ids)[1]["distill_support"].tolist())
    assert ({0.0, 1.0} <= sizes and K not in sizes) or {0.0, 1.0, 2.0} <= sizes


@pytest.mark.parametrize(("support", "direction", "tail"), CELLS)
def test_gradients_reach_the_logits_as_finite_differences_say(support, direction, tail):
    student, teacher = logits(0).requires_grad_(), logits(1)

    def loss(scores):
        (at_student, at_teacher), ids = gathered(scores, teacher, support)
        return topk_loss(at_student, at_teacher, support=support, direction=direction, tail=tail, **ids)[0]

    assert torch.autograd.gradcheck(loss, (student,))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_whole_vocabulary_is_the_exact_divergence(direction):
    student, teacher = logits(3).log_softmax(-1), logits(4).log_softmax(-1)
    p, q = (student, teacher) if direction == "reverse" else (teacher, student)
    exact = (p.exp() * (p - q)).sum(-1)
    for tail in TAILS:
        loss, _ = topk_loss(student, teacher, direction=direction, tail=tail)
        torch.testing.assert_close(loss, exact, rtol=0, atol=1e-10)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_bin_is_a_lower_bound_that_grows_with_k(direction):
    student, teacher = logits(5), logits(6)
    p, q = (student, teacher) if direction == "reverse" else (teacher, student)
    exact = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1)
    last = torch.zeros(TOKENS, dtype=torch.float64)
    for k in range(1, VOCAB):
        ids = student.topk(k, dim=-1).indices
        at = [scores.log_softmax(-1).gather(-1, ids) for scores in (student, teacher)]
        loss, _ = topk_loss(*at, direction=direction)
        assert bool((loss >= last - 1e-12).all())
        assert bool((loss <= exact + 1e-12).all())
        last = loss


@pytest.mark.parametrize(("support", "direction", "tail"), CELLS)
def test_a_teacher_that_is_the_student_gives_zero_loss_and_gradient(support, direction, tail):
    student = logits(7).requires_grad_()
    (at_student, at_teacher), ids = gathered(student, student.detach(), support)
    loss, _ = topk_loss(at_student, at_teacher, support=support, direction=direction, tail=tail, **ids)
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    assert loss.abs().max() < 1e-12
    if tail != "none":  # a bare partial sum has a slope at the optimum: it is no divergence
        assert gradient.abs().max() < 1e-12


def test_renormalising_does_not_see_mass_drained_out_of_the_support_and_the_bin_does():
    drained, kept = torch.tensor([[0.02, 0.02]]).log(), torch.tensor([[0.45, 0.45]]).log()
    teacher = torch.tensor([[0.45, 0.45]]).log()
    assert topk_loss(drained, teacher, tail="renormalised")[0].item() == pytest.approx(0, abs=1e-6)
    assert topk_loss(kept, teacher, tail="bin")[0].item() == pytest.approx(0, abs=1e-6)
    assert topk_loss(drained, teacher, tail="bin")[0].item() > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_student_sure_of_one_token_stays_finite(dtype):
    student = torch.tensor([[0.0, -40, -50]], dtype=dtype, requires_grad=True)
    teacher = torch.tensor([[-0.1, -3, -5]], dtype=dtype)
    for direction, tail in itertools.product(DIRECTIONS, TAILS):
        loss, _ = topk_loss(student, teacher, direction=direction, tail=tail)
        (gradient,) = torch.autograd.grad(loss.sum(), student)
        assert loss.isfinite().all()
        assert gradient.isfinite().all()


def test_padded_ids_are_no_tokens():
    short = topk_loss(torch.tensor([[-1.0, -2]]), torch.tensor([[-1.5, -1.2]]))[0]
    padded = topk_loss(
        torch.tensor([[-1.0, -2, 0]]), torch.tensor([[-1.5, -1.2, 0]]), student_ids=torch.tensor([[4, 2, -1]])
    )[0]
    assert torch.equal(short, padded)
    both_padded = {"student_ids": torch.tensor([[4, -1]]), "teacher_ids": torch.tensor([[-1, -1]])}
    loss, metrics = topk_loss(torch.zeros(1, 2), torch.zeros(1, 2), support="overlap", **both_padded)
    assert loss.item() == 0
    assert metrics["distill_support"].item() == 0


def dense_surrogate(student, old, teacher, support, low, high, delta_clip):
    results = []
    rows = zip(*(x.log_softmax(-1).tolist() for x in (student, old, teacher)), strict=True)
    for s, o, t in rows:
        mine, theirs = (set(sorted(range(VOCAB), key=lambda v, p=p: -p[v])[:K]) for p in (o, t))
        chosen = {"student": mine, "teacher": theirs, "overlap": mine & theirs}[support]
        mass, total = sum(math.exp(o[v]) for v in chosen), 0.0
        for v in chosen:
            delta = min(max(t[v] - o[v], -delta_clip), delta_clip)
            advantage, ratio = math.exp(o[v]) / mass * delta, math.exp(s[v] - o[v])
            total += max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
        results.append(total)
    return results


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("delta_clip", [0.5, 1e9])
def test_surrogate_equals_the_dense_reference_and_finite_differences(support, delta_clip):
    old, teacher = logits(0), logits(1)
    student = (old + 0.2 * logits(2)).requires_grad_()
    student_ids, teacher_ids = top_ids(old), top_ids(teacher)
    ids = teacher_ids if support == "teacher" else student_ids

    def loss(scores):
        at = [x.log_softmax(-1).gather(-1, ids) for x in (scores, old, teacher)]
        lists = {"student_ids": student_ids, "teacher_ids": teacher_ids}
        clips = {"eps_clip": 0.2, "eps_clip_high": 0.28, "delta_clip": delta_clip}
        return topk_surrogate(*at, support=support, **clips, **lists)[0]

    expected = dense_surrogate(student.detach(), old, teacher, support, 0.2, 0.28, delta_clip)
    assert loss(student).tolist() == pytest.approx(expected, abs=1e-12)
    assert torch.autograd.gradcheck(loss, (student,))


def test_surrogate_on_policy_gradient_is_minus_weighted_delta():
    old = torch.tensor([[0.6, 0.2]], dtype=torch.float64).log()
    teacher = torch.tensor([[0.3, 0.5]], dtype=torch.float64).log()
    current = old.clone().requires_grad_()
    loss, metrics = topk_surrogate(current, old, teacher, eps_clip=0.2)
    (gradient,) = torch.autograd.grad(loss.sum(), current)
    assert gradient.tolist()[0] == pytest.approx([0.75 * math.log(2), -0.25 * math.log(2.5)], abs=1e-12)
    assert metrics["distill_clipfrac"].item() == 0


def test_advantage_term_is_the_negative_reverse_kl_of_sampled_tokens():
    old, teacher = torch.tensor([-1.0, -2, -3]), torch.tensor([-0.5, -4, float("nan")])
    mask = torch.tensor([1, 1, 0])
    assert advantage_term(old, teacher, mask=mask).tolist() == [0.5, -2, 0]
    assert advantage_term(old, teacher, coef=0.5, clip=1.0, mask=mask).tolist() == [0.25, -0.5, 0]
    assert not advantage_term(old.requires_grad_(), teacher, mask=mask).requires_grad


def test_a_vocabulary_mismatch_is_an_error_that_names_the_token():
    student = {"a": 0, "b": 1, "c": 2}
    check_same_vocabulary(student, dict(reversed(student.items())))
    with pytest.raises(ValueError, match="'b' is 3 in the teacher and 1 in the student"):
        check_same_vocabulary(student, {"a": 0, "b": 3, "c": 2})
    with pytest.raises(ValueError, match="'c' is None in the teacher and 2"):
        check_same_vocabulary(student, {"a": 0, "b": 1})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"support": "students"}, "did you mean 'student'"),
        ({"direction": "reversed"}, "did you mean 'reverse'"),
        ({"tail": "bins"}, "did you mean 'bin'"),
        ({"support": "overlap"}, "pass student_ids= and teacher_ids="),
        ({"student_ids": torch.zeros(2, 2, dtype=torch.int64)}, "are not those"),
        ({"mask": torch.ones(3)}, "equally long"),
    ],
)
def test_bad_input_is_named(options, match):
    with pytest.raises(ValueError, match=match):
        topk_loss(torch.zeros(2, 3), torch.zeros(2, 3), **options)
    with pytest.raises(ValueError, match="num_tokens, k"):
        topk_loss(torch.zeros(2), torch.zeros(2))
    with pytest.raises(ValueError, match="old_log_probs"):
        topk_surrogate(torch.zeros(2, 3), torch.zeros(2, 1), torch.zeros(2, 3), eps_clip=0.2)


def test_only_the_student_gets_a_gradient():
    student, old, teacher = (torch.full((2, 3), -1.5).requires_grad_() for _ in range(3))
    for direction, tail in itertools.product(DIRECTIONS, TAILS):
        loss, metrics = topk_loss(student, teacher, direction=direction, tail=tail)
        loss.sum().backward()
        assert not any(m.requires_grad for m in metrics.values())
    topk_surrogate(student, old, teacher, eps_clip=0.2)[0].sum().backward()
    assert student.grad is not None
    assert old.grad is None
    assert teacher.grad is None
