import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from limes.models.attention import Row, RowAttention

CPU = torch.device("cpu")


def grow(parents, lengths):
    """Rows of a forest: row i continues a beginning of its parent's path (-1: a sequence of its own).

    Returns the rows and the number of tokens; token n of the pack is stored at n.
    """
    rows, num = [], 0
    for (parent, kept), length in zip(parents, lengths, strict=True):
        path = rows[parent].path[: 1 + kept % len(rows[parent].path)] if parent >= 0 else np.empty(0, dtype=np.int64)
        rows.append(Row(num, length, np.concatenate([path, num + np.arange(length)])))
        num += length
    return rows, num


@st.composite
def forests(draw):
    num = draw(st.integers(1, 7))
    parents = [(draw(st.integers(-1, i - 1)), draw(st.integers(0, 60))) for i in range(num)]
    lengths = [draw(st.sampled_from([1, 1, 2, 3, 7, 20, 45])) for _ in range(num)]
    return grow(parents, lengths)


def dense(rows, query_NHD, key_NKD, value_NKD, scale):
    """One query at a time over its own path."""
    repeat = query_NHD.shape[1] // key_NKD.shape[1]
    out = torch.empty_like(query_NHD)
    for row in rows:
        for i in range(row.num):
            path = torch.from_numpy(row.path[: len(row.path) - row.num + i + 1])
            key, value = (x[path].repeat_interleave(repeat, 1) for x in (key_NKD, value_NKD))
            scores = torch.einsum("hd,nhd->hn", query_NHD[row.start + i], key) * scale
            out[row.start + i] = torch.einsum("hn,nhd->hd", scores.softmax(-1), value)
    return out


def tensors(num, heads, key_heads, dim=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num, heads, dim), (num, key_heads, dim), (num, key_heads, dim)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def attend(rows, num, query, key, value, scale):
    plan = RowAttention(rows, num, CPU)
    return plan.attend(query, lambda index: (key.index_select(0, index), value.index_select(0, index)), scale)


@settings(max_examples=80, deadline=None)
@given(forest=forests(), heads=st.sampled_from([(4, 4), (4, 2), (6, 1), (1, 1)]), seed=st.integers(0, 99))
def test_rows_of_random_trees_equal_dense_attention(forest, heads, seed):
    rows, num = forest
    query, key, value = tensors(num, *heads, seed=seed)
    got = attend(rows, num, query, key, value, 0.37)
    expected = dense(rows, query, key, value, 0.37)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    slope = torch.linspace(-1, 1, got.numel(), dtype=torch.float64).view_as(got)
    for a, b in zip(
        torch.autograd.grad((got * slope).sum(), [query, key, value]),
        torch.autograd.grad((expected * slope).sum(), [query, key, value]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@settings(max_examples=40, deadline=None)
@given(forest=forests(), seed=st.integers(0, 99), other=st.integers(0, 6))
@example(forest=grow([(-1, 0)] * 3, [3, 7, 9]), seed=0, other=0)
@example(forest=grow([(-1, 0), (-1, 0), (1, 6), (1, 3)], [3, 7, 5, 5]), seed=0, other=0)
def test_no_row_reads_what_is_not_on_its_path(forest, seed, other):
    """NaN in a whole sequence reaches those who build on it and nobody else: padding included, gradients included."""
    rows, num = forest
    poisoned = rows[other % len(rows)]
    query, key, value = (x.detach() for x in tensors(num, 4, 2, seed=seed))
    clean = attend(rows, num, query, key, value, 1.0)
    own = slice(poisoned.start, poisoned.start + poisoned.num)
    for x in (query, key, value):
        x[own] = torch.nan
    key.requires_grad_()
    value.requires_grad_()
    dirty = attend(rows, num, query, key, value, 1.0)
    for row in rows:
        mine = slice(row.start, row.start + row.num)
        if not set(range(own.start, own.stop)) & set(row.path.tolist()):
            assert torch.equal(dirty[mine], clean[mine])


def test_storage_may_lie_anywhere():
    """Queries of two sequences whose keys are scattered over a larger store, as in the engine's cache."""
    store = 50
    paths = [np.array([40, 3, 17, 22]), np.array([9, 8, 7, 6, 30, 31])]
    rows = [Row(0, 2, paths[0]), Row(2, 3, paths[1])]
    query, _, _ = tensors(5, 4, 2)
    _, key, value = tensors(store, 4, 2)
    got = attend(rows, 5, query, key, value, 0.5)
    for row in rows:
        for i in range(row.num):
            path = torch.from_numpy(row.path[: len(row.path) - row.num + i + 1])
            k, v = (x[path].repeat_interleave(2, 1) for x in (key, value))
            weights = (torch.einsum("hd,nhd->hn", query[row.start + i], k) * 0.5).softmax(-1)
            torch.testing.assert_close(got[row.start + i], torch.einsum("hn,nhd->hd", weights, v))


def test_rows_of_unlike_lengths_are_not_padded_to_the_longest():
    rows, num = grow([(-1, 0)] * 40 + [(-1, 0)], [4] * 40 + [1000])
    plan = RowAttention(rows, num, CPU)
    assert sum(r * q for r, q, _ in (batch.shape for batch in plan.batches)) <= 1.5 * num


def test_every_query_must_belong_to_a_row():
    with pytest.raises(AssertionError, match="every query belongs to a row"):
        RowAttention([Row(0, 2, np.arange(2))], 3, CPU)
