import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from limes.engine.embedded.sampler import Draw, sample_tokens, uniform_noise
from limes.engine.protocol import SampleKey, SamplingParams

WORD = 2**64
T10 = [2.0, 1.0, 0.0, -1.0]


def draw(sample=0, position=0, *, seed=0, rollout=0, banned=(), **sampling):
    return Draw(SamplingParams(max_new_tokens=1, **sampling), SampleKey(seed, rollout, sample), position, banned)


def draw_many(logits, num, **options):
    """`num` draws from one row of logits, by sample index."""
    rows = torch.tensor(np.array(logits), dtype=torch.float32).repeat(num, 1)
    tokens, log_probs = sample_tokens(rows, [draw(i, **options) for i in range(num)])
    return np.array(tokens), np.array(log_probs)


def reference_noise(*words):
    """SplitMix64's finaliser on Python's own integers."""
    state = 0
    for word in words:
        state = ((state ^ (word % WORD)) + 0x9E3779B97F4A7C15) % WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % WORD
        state ^= state >> 31
    return (state >> 11) / 2**53


def reference_distribution(logits, sampling):
    """Plain float64: temper, then top-k and min-p, then top-p of what is left; ties go to the lower id."""
    p = np.exp((logits - logits.max()) / (sampling.temperature or 1.0))
    order = np.argsort(-p, kind="stable")
    kept = [i for rank, i in enumerate(order) if sampling.top_k < 0 or rank < sampling.top_k]
    kept = [i for i in kept if p[i] >= np.float32(sampling.min_p) * p.max()]
    if sampling.top_p < 1:
        total, before, chosen = p[kept].sum(), 0.0, []
        for i in kept:
            if before < sampling.top_p * total:
                chosen.append(i)
            before += p[i]
        kept = chosen
    out = np.zeros_like(p)
    out[kept] = p[kept]
    return out / out.sum()


@settings(max_examples=150, deadline=None, derandomize=True)  # one row in 1e4 lies on the edge of a cut
@given(
    vocab=st.sampled_from([1, 2, 3, 17, 255, 256, 257, 512, 700]),
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.0, 0.5, 4.0, 30.0]),
    temperature=st.sampled_from([0.0, 0.05, 0.6, 1.0, 1.7, 50.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 1e-6]),
    top_k=st.sampled_from([-1, 1, 2, 40, 10**6]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    share_impossible=st.sampled_from([0.0, 0.5]),
)
def test_tokens_and_log_probs_equal_a_float64_reference(
    vocab, seed, spread, temperature, top_p, top_k, min_p, share_impossible
):
    rng = np.random.default_rng(seed)
    rows = np.float32(rng.normal(size=(6, vocab)) * spread)
    rows[:, 1:][rng.random((6, vocab - 1)) < share_impossible] = -np.inf
    draws = [draw(i, seed, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p) for i in range(len(rows))]
    tokens, log_probs = sample_tokens(torch.from_numpy(rows.copy()), draws)
    for row, one, token, log_prob in zip(rows.astype(np.float64), draws, tokens, log_probs, strict=True):
        p = reference_distribution(row, one.sampling)
        assert log_prob <= 0
        if temperature == 0:
            assert row[token] == row.max()
            assert log_prob == pytest.approx(math.log(p[token]), abs=1e-5)
            continue
        upto = np.cumsum(p)
        target = reference_noise(0, 0, one.key.sample_index, seed)
        # a float32 rounding may move a token over an edge of a cut or of its share
        assert upto[token] - p[token] - 1e-5 <= target <= upto[token] + 1e-5
        if p[token] > 0:
            assert log_prob == pytest.approx(math.log(p[token]), abs=2e-4 if top_p < 1 else 1e-5)


@pytest.mark.parametrize(
    ("temperature", "first", "third"),
    [
        (1.0, -0.4401896986, -2.4401896986),
        (0.5, -0.1450779390, -4.1450779390),
        (2.0, -0.7873386717, -1.7873386717),
        (0.6, -0.2080604050, -3.5413937383),
    ],
)
def test_log_probs_at_a_temperature(temperature, first, third):
    tokens, log_probs = draw_many(T10, 2000, temperature=temperature)
    assert log_probs[tokens == 0] == pytest.approx(first, abs=1e-6)
    assert log_probs[tokens == 2] == pytest.approx(third, abs=1e-6)


def test_top_p_keeps_three_tokens_and_scores_under_the_cut_distribution():
    tokens, log_probs = draw_many(T10, 4000, top_p=0.9)
    assert set(tokens) == {0, 1, 2}
    assert log_probs[tokens == 0] == pytest.approx(-0.4076059644, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"min_p": 0.3}, {0, 1}),
        ({"min_p": 0.1}, {0, 1, 2}),
        ({"top_p": 1e-9}, {0}),
        ({"top_k": 3, "top_p": 0.7}, {0, 1}),  # .665 of the three that are left
        ({"min_p": 0.1, "top_k": 1}, {0}),
        ({"top_k": 99}, {0, 1, 2, 3}),
    ],
)
def test_cuts(options, kept):
    tokens, log_probs = draw_many(T10, 4000, **options)
    assert set(tokens) == kept
    weights = np.exp([T10[i] for i in sorted(kept)])
    for token in kept:
        expected = T10[token] - math.log(weights.sum())
        assert log_probs[tokens == token] == pytest.approx(expected, abs=1e-6)


def test_ties_at_a_cut_keep_as_many_tokens_as_were_asked_for():
    assert set(draw_many([1.0] * 7, 2000, top_k=3)[0]) == {0, 1, 2}
    assert set(draw_many([1.0] * 4, 2000, top_p=0.5)[0]) == {0, 1}
    assert set(draw_many([1.0] * 4, 2000, min_p=1.0)[0]) == {0, 1, 2, 3}


def test_rows_of_a_batch_have_settings_of_their_own():
    rows = torch.tensor([T10] * 5)
    draws = [
        draw(1, temperature=0.0),
        draw(2, temperature=0.5),
        draw(3, top_k=1),
        draw(4, banned=(0,), temperature=0.0),
        draw(5, temperature=2.0, top_p=0.1),
    ]
    tokens, log_probs = sample_tokens(rows, draws)
    assert [tokens[i] for i in (0, 2, 3, 4)] == [0, 0, 1, 0]
    assert log_probs[0] == pytest.approx(-0.4401896986, abs=1e-6)
    assert [log_probs[2], log_probs[4]] == pytest.approx([0, 0], abs=1e-7)
    assert log_probs[3] == pytest.approx(1.0 - math.log(math.e + 1 + 1 / math.e), abs=1e-6)


@pytest.mark.parametrize("vocab", [300, 256, 4])
def test_impossible_tokens_are_never_drawn(vocab):
    logits = np.full(vocab, -np.inf)
    possible = [0, vocab // 2, vocab - 2]
    logits[possible] = [-3.0, 0.0, -3.0]
    tokens, log_probs = draw_many(logits, 20_000)
    assert set(tokens) == set(possible)
    assert np.isfinite(log_probs).all()


def test_noise_at_its_ends_draws_possible_tokens(monkeypatch):
    logits = torch.full((2, 600), -torch.inf)
    logits[:, [3, 7, 590]] = torch.tensor([0.1, 0.7, 0.2]).log()
    ends = np.array([0.0, 1 - 2.0**-53])
    monkeypatch.setattr("limes.engine.embedded.sampler.uniform_noise", lambda draws: ends)
    assert sample_tokens(logits, [draw(), draw()])[0] == [3, 590]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30])
def test_a_very_low_temperature_is_greedy_and_not_nan(temperature):
    tokens, log_probs = draw_many([50.0, 49.0, -1e30, -3.0], 50, temperature=temperature)
    assert set(tokens) == {0}
    assert set(log_probs) == {0.0}


def test_rows_without_a_finite_distribution_are_marked_and_harm_no_other_row():
    bad = [[-torch.inf] * 4, [0.0, torch.nan, 0.0, 0.0], [0.0, torch.inf, 0.0, 0.0]]
    rows = torch.tensor([T10, *bad, T10])
    for options in ({}, {"top_p": 0.9, "top_k": 3, "min_p": 0.01}, {"temperature": 0.0}):
        tokens, log_probs = sample_tokens(rows.clone(), [draw(7, **options)] * 5)
        assert np.isnan(log_probs[1:4]).all()
        assert all(0 <= token < 4 for token in tokens)
        assert tokens[0] == tokens[4]
        assert log_probs[0] == log_probs[4] <= 0


def test_frequencies_follow_the_distribution():
    num, vocab = 60_000, 600  # three blocks, the last one not full
    logits = np.random.default_rng(5).normal(size=vocab) * 1.5
    tokens, _ = draw_many(logits, num, temperature=1.3, seed=11)
    p = reference_distribution(logits, SamplingParams(1, temperature=1.3))
    likely = p * num >= 10
    seen, expected = np.bincount(tokens, minlength=vocab), p * num
    chi = ((seen - expected) ** 2 / expected)[likely].sum()
    freedom = likely.sum()
    assert abs(chi - freedom) < 5 * math.sqrt(2 * freedom)
    assert abs(seen[~likely].sum() - expected[~likely].sum()) < 5 * math.sqrt(expected[~likely].sum())


INTS = st.one_of(st.integers(-5, 5), st.integers(-(2**70), 2**70))


@settings(max_examples=300, deadline=None)
@given(keys=st.lists(st.tuples(INTS, INTS, INTS, INTS), min_size=1, max_size=8))
def test_noise_is_a_function_of_the_four_words_alone(keys):
    draws = [draw(s, p, seed=seed, rollout=r) for seed, r, s, p in keys]
    together = uniform_noise(draws).tolist()
    assert together == [reference_noise(*key) for key in keys]
    assert together == [uniform_noise([one])[0] for one in draws]
    assert all(0 <= u < 1 for u in together)


@settings(max_examples=200, deadline=None)
@given(
    key=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=4, max_size=4),
    word=st.integers(0, 3),
    change=st.one_of(st.integers(1, 4), st.sampled_from([2**31, 2**32, 2**62])),
)
def test_each_word_of_the_key_matters(key, word, change):
    other = list(key)
    other[word] += change
    a, b = uniform_noise([draw(s, p, seed=seed, rollout=r) for seed, r, s, p in (key, other)])
    assert a != b


def test_words_do_not_stand_for_each_other():
    words = [(a, b, c, d) for a in range(6) for b in range(6) for c in range(6) for d in range(6)]
    noise = uniform_noise([draw(c, d, seed=a, rollout=b) for a, b, c, d in words])
    assert len(set(noise)) == len(words)


def test_noise_is_uniform_and_neighbours_are_independent():
    """Over positions of one sample, and over samples at one position: moments, and correlation of neighbours."""
    num = 40_000
    for noise in (
        uniform_noise([draw(3, i, seed=42, rollout=7) for i in range(num)]),
        uniform_noise([draw(i, 3, seed=42, rollout=7) for i in range(num)]),
    ):
        centred = noise - 0.5
        limit = 5 / math.sqrt(num)
        assert abs(centred.mean()) < limit * math.sqrt(1 / 12)
        assert abs((centred**2).mean() - 1 / 12) < limit * math.sqrt(1 / 180)
        assert abs((centred[1:] * centred[:-1]).mean()) < limit / 12
        counts = np.histogram(noise, bins=50, range=(0, 1))[0]
        assert ((counts - num / 50) ** 2 / (num / 50)).sum() < 49 + 5 * math.sqrt(98)
