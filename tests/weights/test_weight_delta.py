"""Deltas: exact for every bit of every type, checked before use, and a chain of versions."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from weight_cases import DTYPES, bits, same_bits, sender_of, tensor_of

from limes.weights import LocalPeer, ModuleSource, WeightError, WeightReceiver
from limes.weights.checksum import BLOCK, carried, checksum, words_of
from limes.weights.delta import CHANGES, INDEX, ApplyDelta
from limes.weights.encoding import Change, Plane, diff, move, moves


@st.composite
def pairs(draw):
    """Two tensors of a type with any bits; they differ in a few places, or everywhere, or not at all."""
    dtype = draw(st.sampled_from(DTYPES))
    content = draw(st.binary(max_size=400))
    other = bytearray(content)
    if draw(st.booleans()):
        other = bytearray(draw(st.binary(min_size=len(content), max_size=len(content))))
    elif content:
        for place in draw(st.lists(st.integers(0, len(content) - 1), max_size=5)):
            other[place] ^= draw(st.integers(0, 255))
    return tensor_of(content, dtype), tensor_of(bytes(other), dtype)


def moved_by(change, tensor):
    words = words_of(tensor)
    move(words, *moves(change, words))


@given(pairs())
def test_the_old_tensor_and_the_change_give_the_new_one_bit_for_bit(pair):
    old, new = pair
    change = diff(words_of(old), words_of(new))
    result = old.clone()
    moved_by(change, result)
    assert bits(result) == bits(new)
    assert change.num_changed == int((words_of(old) != words_of(new)).sum())


@given(pairs())
def test_a_checksum_is_carried_along_with_changes(pair):
    old, new = words_of(pair[0]), words_of(pair[1])
    positions = (old != new).nonzero()[:, 0]
    assert carried(checksum(pair[0]), positions, old[positions], new[positions]) == checksum(pair[1])


@given(pairs())
def test_checksums_tell_different_bits_apart(pair):
    assert (checksum(pair[0]) == checksum(pair[1])) == (bits(pair[0]) == bits(pair[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_special_values_survive(dtype):
    old = torch.tensor([0.0, -0.0, math.nan, math.inf, 1.0, -1.0, 1e-40, 2.0], dtype=dtype)
    for new in (old.flip(0), -old, old * 0, torch.full_like(old, -0.0), torch.full_like(old, math.nan)):
        result = old.clone()
        moved_by(diff(words_of(old), words_of(new)), result)
        assert bits(result) == bits(new)


@pytest.mark.parametrize("num", [BLOCK - 1, BLOCK, BLOCK + 1, 40 * BLOCK + 3])
def test_checksums_of_large_tensors_see_every_place_and_the_order(num):
    tensor = torch.zeros(num)
    sums = {checksum(tensor)}
    for place in (0, 1, num // 2, num - 1):
        tensor[place] = -0.0
        sums.add(checksum(tensor))
    tensor[0], tensor[2] = 0.0, -0.0
    sums.add(checksum(tensor))
    assert len(sums) == 6
    twice = torch.zeros(2 * BLOCK)
    twice[0] = 1.0
    assert checksum(twice) != checksum(twice.roll(BLOCK))


def test_small_steps_take_few_bytes():
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(100_000, generator=generator) * 0.02
    dense = diff(words_of(old), words_of(old + 1e-5 * torch.randn(100_000, generator=generator).sign()))
    assert dense.is_dense
    assert size_of(dense) < 0.7 * 4 * len(old)
    sparse = old.to(torch.bfloat16)
    moved = sparse.clone()
    moved[::50] *= 1.01
    change = diff(words_of(sparse), words_of(moved))
    assert change.num_changed == 2000
    assert size_of(change) < 0.02 * 2 * len(old)
    assert size_of(diff(words_of(old), words_of(old))) == 0


def size_of(change):
    return sum(len(plane.content) for plane in (*change.gaps, *change.differences))


@pytest.mark.parametrize(
    "change",
    [
        Change(3, False, (), (Plane(0, False, b"\1\1\1"),)),  # positions 0, 1 and 2 of two words
        Change(1, False, (Plane(0, False, b"\2"),), (Plane(0, False, b"\1"),)),  # position 2
        Change(1, False, (Plane(7, False, b"\xff"),), (Plane(0, False, b"\1"),)),  # a position below 0
        Change(2, False, (Plane(7, False, b"\0\xff"),), (Plane(0, False, b"\1\1"),)),  # positions that fall
        Change(2, True, (), (Plane(0, False, b"\1"),)),
        Change(2, True, (), (Plane(4, False, b"\1\1"),)),
        Change(-1, True, (), ()),
    ],
)
def test_broken_changes_are_refused(change):
    with pytest.raises(ValueError, match=r"change|plane"):
        moves(change, torch.zeros(2, dtype=torch.int32))


# The chain of versions


def chain(tmp_path: Path, num_updates: int, **settings):
    """A trainer and an engine that agree after some updates."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.Linear(300, 2)).to(torch.bfloat16)
    engine = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    receiver = WeightReceiver(engine)
    sender = sender_of("delta", tmp_path / "weights", **settings)
    source = ModuleSource(model)
    sender.connect(source, [LocalPeer(receiver)])
    reports = []
    for version in range(1, num_updates + 1):
        change_a_little(model)
        reports.append(sender.update(source, version))
        assert same_bits(engine, model.state_dict())
    return model, engine, receiver, sender, source, reports


def change_a_little(model):
    with torch.no_grad():
        model[0].weight.view(-1)[::30] += 0.01


def test_updates_after_the_first_bring_only_what_changed(tmp_path):
    model, _, receiver, sender, source, reports = chain(tmp_path, 3)
    whole = sum(p.numel() * 2 for p in model.parameters())
    assert [report.density for report in reports] == [1.0, pytest.approx(80 / 3302), pytest.approx(80 / 3302)]
    assert reports[0].num_bytes > whole
    assert reports[1].num_bytes < whole / 2  # most of it is the index
    assert receiver.version == 3
    nothing = sender.update(source, 4)
    assert nothing.density == 0
    assert nothing.metrics()["perf/update_weights_density"] == 0
    sender.close()
    assert not (tmp_path / "weights").exists()


def test_a_weight_that_is_not_the_base_is_refused_by_name_and_nothing_is_touched(tmp_path):
    model, engine, receiver, sender, source, _ = chain(tmp_path, 2)
    engine["1.bias"].view(torch.int16)[1] ^= 1
    before = {name: tensor.clone() for name, tensor in engine.items()}
    change_a_little(model)
    with pytest.raises(WeightError, match=r"1\.bias is not that of version 2"):
        sender.update(source, 3)
    assert same_bits(engine, before)
    assert (receiver.version, receiver.intact) == (2, True)
    assert sender.update(source, 3).density == 1.0  # the whole, since the chain broke
    assert same_bits(engine, model.state_dict())
    sender.close()


def test_a_version_that_does_not_follow_is_sent_whole(tmp_path):
    model, engine, receiver, sender, source, _ = chain(tmp_path, 2)
    assert sender.update(source, 7).density == 1.0
    assert receiver.version == 7
    receiver.check_weights("scramble")  # the engine says so itself
    change_a_little(model)
    assert sender.update(source, 8).density == 1.0
    change_a_little(model)
    assert sender.update(source, 9).density < 0.1
    assert same_bits(engine, model.state_dict())
    sender.close()


def kept_delta(tmp_path):
    """The folder of the delta from 1 to 2, and an engine at version 1."""
    *_, sender, _, _ = chain(tmp_path, 1)
    sender.close()
    model, _, _, sender, _, _ = chain(tmp_path, 2, keep_files=True)
    (folder,) = (tmp_path / "weights").glob("*/v00000002")
    _, engine, receiver, *_ = chain(tmp_path / "other", 1)
    return folder, receiver, engine, model


def test_a_delta_is_refused_by_an_engine_with_another_version(tmp_path):
    folder, receiver, engine, model = kept_delta(tmp_path)
    receiver.version = 0
    receiver.begin(2)
    with pytest.raises(WeightError, match="changes version 1, but the engine has version 0"):
        ApplyDelta(str(folder), 2).apply(receiver)
    receiver.version, receiver.intact = 1, False
    with pytest.raises(WeightError, match="version 1, in parts"):
        ApplyDelta(str(folder), 2).apply(receiver)
    receiver.intact = True
    with pytest.raises(WeightError, match="leads from version 1 to 2, not to 3"):
        ApplyDelta(str(folder), 3).apply(receiver)
    ApplyDelta(str(folder), 2).apply(receiver)
    assert same_bits(engine, model.state_dict())


def test_a_broken_delta_is_found_and_the_engine_knows_that_its_weights_are_broken(tmp_path):
    folder, receiver, _, _ = kept_delta(tmp_path)
    index = json.loads((folder / INDEX).read_text())
    entry = index["weights"]["0.weight"]
    place, deflated, start, num = entry["differences"][0]
    content = bytearray((folder / CHANGES).read_bytes())
    if deflated:  # leave the stream readable: store other differences
        entry["differences"][0] = [place, False, start, entry["num_changed"]]
        content = content[:start] + bytes([2]) * entry["num_changed"] + content[start + num :]
    else:
        content[start] ^= 4
    (folder / CHANGES).write_bytes(content)
    (folder / INDEX).write_text(json.dumps(index))
    receiver.begin(2)
    with pytest.raises(WeightError, match=r"0\.weight"):
        ApplyDelta(str(folder), 2).apply(receiver)
    assert not receiver.intact


def test_a_delta_of_other_weights_is_refused(tmp_path):
    folder, _, engine, _ = kept_delta(tmp_path)
    receiver = WeightReceiver({**engine, "more": torch.zeros(2)})
    receiver.version = 1
    receiver.begin(2)
    with pytest.raises(WeightError, match="do not both have more"):
        ApplyDelta(str(folder), 2).apply(receiver)
