import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model, tiny_tokenizer

from limes.models.lm_head import head_log_probs
from limes.models.policy import make_policy
from limes.training.packing import cut_micro_batches, pack

DEVICE = torch.device("cpu")


def plain_log_probs(model, sequences, lengths, temperature):
    """One sequence at a time through transformers' own attention."""
    parts = []
    for tokens, num in zip(sequences, lengths, strict=True):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0] / temperature
        log_p = torch.log_softmax(logits, -1)[:-1].gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
        parts.append(log_p[len(log_p) - num :])
    return torch.cat(parts)


def packed_log_probs(policy, sequences, lengths, temperature, *, share=True, chunk=5):
    batch = pack(sequences, lengths, DEVICE, share=share)
    hidden = policy.hidden(batch.token_ids, batch.positions, batch.attention)
    log_probs, _ = head_log_probs(
        hidden.index_select(0, batch.head_rows), policy.head_weight, batch.targets, temperature=temperature, chunk=chunk
    )
    return log_probs.index_select(0, batch.pair_index)


SEQUENCES = st.lists(
    st.tuples(st.lists(st.integers(3, 5), min_size=1, max_size=6), st.lists(st.integers(3, 5), min_size=1, max_size=5)),
    min_size=1,
    max_size=7,
)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@settings(max_examples=15, deadline=None)
@given(rows=SEQUENCES)
def test_packed_log_probs_and_gradients_equal_separate_sequences(family, temperature, rows):
    sequences, lengths = [p + r for p, r in rows], [len(r) for _, r in rows]
    weights = torch.linspace(-1, 1, sum(lengths), dtype=torch.float64)
    plain = tiny_model(family, dtype=torch.float64)
    packed = tiny_model(family, dtype=torch.float64)
    policy = make_policy(packed, tiny_tokenizer())
    expected = plain_log_probs(plain, sequences, lengths, temperature)
    got = packed_log_probs(policy, sequences, lengths, temperature)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    (expected * weights).sum().backward()
    (got * weights).sum().backward()
    for (name, a), b in zip(plain.named_parameters(), packed.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=0, atol=1e-9, msg=name)


@settings(max_examples=30, deadline=None)
@given(rows=SEQUENCES, max_tokens=st.integers(1, 40), share=st.booleans())
def test_micro_batches_hold_each_sequence_once_and_respect_the_limit(rows, max_tokens, share):
    sequences, lengths = [p + r for p, r in rows], [len(r) for _, r in rows]
    batches = cut_micro_batches(sequences, max_tokens, share=share)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sequences)))
    for batch in batches:
        packed = pack([sequences[i] for i in batch], [lengths[i] for i in batch], DEVICE, share=share)
        assert len(batch) == 1 or len(packed.token_ids) <= max_tokens


def test_common_beginnings_are_computed_once():
    prompt = [7] * 10
    sequences = [prompt + [8, i] for i in range(4)] + [prompt + [8, 0]]
    packed = pack(sequences, [2] * 5, DEVICE)
    assert len(packed.token_ids) == 11  # ten of the prompt and the 8
    assert len(packed.targets.token_M) == 5  # the 8 once, then four different ends
    assert len(pack(sequences, [2] * 5, DEVICE, share=False).token_ids) == 55
