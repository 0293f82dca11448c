"""Cutting weights into buckets of a bounded size, and putting them together again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from weight_cases import noise_like, same_bits, weight_sets

from limes.weights.buckets import cut_buckets, packed, unpack
from limes.weights.names import WeightError, specs_of


@given(weight_sets(), st.integers(1, 300))
def test_every_byte_is_in_exactly_one_bucket_and_none_is_too_large(weights, bucket_bytes):
    specs = specs_of(weights)
    buckets = cut_buckets(specs, bucket_bytes)
    place = dict.fromkeys(specs, 0)
    for number, bucket in enumerate(buckets):
        assert bucket.num_bytes == bucket_bytes or (number == len(buckets) - 1 and 0 < bucket.num_bytes < bucket_bytes)
        used = 0
        for piece in bucket.pieces:
            assert (piece.offset, piece.start) == (used, place[piece.name])
            assert piece.num > 0
            used += piece.num
            place[piece.name] += piece.num
        assert used == bucket.num_bytes
    assert place == {name: spec.num_bytes for name, spec in specs.items()}
    names = [piece.name for bucket in buckets for piece in bucket.pieces]
    assert list(dict.fromkeys(names)) == [name for name, spec in specs.items() if spec.num_bytes]


@given(weight_sets(), st.integers(1, 300))
def test_packed_and_unpacked_weights_are_the_same_bits(weights, bucket_bytes):
    buckets = cut_buckets(specs_of(weights), bucket_bytes)
    arrived = noise_like(weights)
    buffer = torch.zeros(bucket_bytes, dtype=torch.uint8)
    for bucket, content in zip(buckets, packed(iter(weights.items()), buckets, lambda: buffer), strict=True):
        unpack(content, bucket, arrived)
    assert same_bits(arrived, weights)


def test_tensors_are_asked_for_one_bucket_at_a_time():
    """A trainer gathers each tensor when it is asked for it, so that it never holds more than a bucket."""
    weights = {f"w{i}": torch.full((10,), i, dtype=torch.uint8) for i in range(6)}
    asked = []

    def tensors():
        for name, tensor in weights.items():
            asked.append(name)
            yield name, tensor

    buckets = cut_buckets(specs_of(weights), 20)
    seen = [list(asked) for _ in packed(tensors(), buckets, lambda: torch.zeros(20, dtype=torch.uint8))]
    assert seen == [["w0", "w1"], ["w0", "w1", "w2", "w3"], list(weights)]


def test_a_weight_with_gaps_is_refused_by_name():
    weights = {"w": torch.zeros(4, 4, dtype=torch.uint8).T[1:3, ::2]}
    buckets = cut_buckets(specs_of(weights), 100)
    with pytest.raises(WeightError, match="w is not contiguous"):
        unpack(torch.zeros(4, dtype=torch.uint8), buckets[0], weights)
