"""Samples and training records come back from the disk as they went."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from limes.records import Sample, Status
from limes.run import TrainRecord, read_samples, read_train_records, write_samples, write_train_records
from limes.run.files import from_json, to_json
from limes.run.samples import run_lengths

FLOATS = st.floats(allow_nan=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.text()}), max_size=3
)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Any sample that obeys the record's rules."""
    sample = Sample(
        index=draw(st.integers(0)),
        group_index=draw(st.integers(0)),
        rollout_id=draw(st.none() | st.integers(0)),
        prompt=draw(st.text() | MESSAGES),
        tokens=draw(st.lists(st.integers(0, 200_000), max_size=5)),
        response=draw(st.text()),
        status=draw(st.sampled_from(Status)),
        reward=draw(st.none() | FLOATS | st.dictionaries(st.text(), FLOATS | st.none(), max_size=3)),
        label=draw(JSON),
        metadata=draw(st.dictionaries(st.text(), JSON, max_size=3)),
        error=draw(st.none() | st.text()),
    )
    for _ in range(draw(st.integers(0, 3))):
        tokens = draw(st.lists(st.integers(0, 200_000), max_size=5))
        if draw(st.booleans()):
            log_probs = [draw(FLOATS) for _ in tokens]
            sample.append_tokens(tokens, log_probs=log_probs, weight_versions=[draw(st.integers(0, 3)) for _ in tokens])
        else:
            sample.append_tokens(tokens, trainable=False)
    return sample


@given(st.lists(samples(), max_size=4))
def test_round_trip_of_samples(tmp_path_factory: pytest.TempPathFactory, written: list[Sample]):
    folder = tmp_path_factory.mktemp("rollouts")
    path = write_samples(folder, 7, written)
    assert path == folder / "000007.samples.jsonl"
    assert path.read_text().count("\n") == len(written)
    read = read_samples(folder, 7)
    assert read == written
    assert [repr(sample) for sample in read] == [repr(sample) for sample in written]  # tells -0.0 from 0.0, 1 from 1.0
    for sample in read:
        sample.check()


@given(st.floats())
def test_every_float_survives(value: float):
    text = to_json({"x": [value]})
    assert "NaN" not in text
    assert "Infinity" not in text
    (back,) = from_json(text)["x"]
    assert type(back) is float
    assert (
        math.isnan(back) if math.isnan(value) else (back == value and math.copysign(1, back) == math.copysign(1, value))
    )


@given(st.lists(st.integers(0, 2)))
def test_run_lengths(values: list[int]):
    runs = run_lengths(values)
    assert [value for value, count in runs for _ in range(count)] == values
    assert all(a[0] != b[0] for a, b in pairwise(runs))


def test_odd_values_never_cost_the_file(tmp_path: Path):
    loop: dict = {}
    loop["self"] = loop
    odd = {
        "float32": np.float32(0.5),
        "array": np.arange(3),
        "set": {1},
        "object": object,
        ("a", 1): (1, float("inf")),
        "loop": loop,
    }
    write_samples(tmp_path, 0, [Sample(0, 0, reward=float("nan"), label=np.int64(3), metadata=odd)])
    (sample,) = read_samples(tmp_path, 0)
    assert math.isnan(sample.reward)  # type: ignore[arg-type]
    assert sample.label == 3
    assert sample.metadata["float32"] == 0.5
    assert sample.metadata["array"] == [0, 1, 2]
    assert sample.metadata["('a', 1)"] == [1, float("inf")]
    assert sample.metadata["set"] == {"$repr": "{1}"}


def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path):
    write_samples(tmp_path, 0, [Sample(1, 0)])

    def broken():
        yield Sample(2, 0)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_samples(tmp_path, 0, broken())
    assert [sample.index for sample in read_samples(tmp_path, 0)] == [1]
    assert len(list(tmp_path.iterdir())) == 1


def test_evaluations_have_files_of_their_own(tmp_path: Path):
    write_samples(tmp_path, 0, [Sample(1, 0)])
    write_samples(tmp_path, 0, [Sample(2, 0)], kind="eval")
    assert [sample.index for sample in read_samples(tmp_path, 0)] == [1]
    assert [sample.index for sample in read_samples(tmp_path, 0, kind="eval")] == [2]


def test_a_broken_line_is_named(tmp_path: Path):
    path = write_samples(tmp_path, 0, [Sample(1, 0)])
    with path.open("a") as file:
        file.write('{"index": 2}\n')
    with pytest.raises(ValueError, match=r"000000\.samples\.jsonl, line 2"):
        read_samples(tmp_path, 0)


@given(st.dictionaries(st.integers(0), st.tuples(FLOATS | st.lists(FLOATS), st.none() | st.lists(FLOATS)), max_size=4))
def test_round_trip_of_train_records(tmp_path_factory: pytest.TempPathFactory, values: dict):
    folder = tmp_path_factory.mktemp("rollouts")
    written = {
        index: TrainRecord(index, advantages, log_probs, log_probs, {"returns": log_probs})
        for index, (advantages, log_probs) in values.items()
    }
    assert write_train_records(folder, 3, written.values()) == folder / "000003.train.jsonl"
    assert read_train_records(folder, 3) == written


def test_ranks_write_files_of_their_own_and_are_read_together(tmp_path: Path):
    paths = {write_train_records(tmp_path, 3, [TrainRecord(rank, float(rank))], rank=rank) for rank in range(12)}
    write_train_records(tmp_path, 4, [TrainRecord(0, 9.0)])
    assert len(paths) == 12
    assert list(read_train_records(tmp_path, 3)) == list(range(12))
    write_train_records(tmp_path, 3, [TrainRecord(5, 0.0)])
    with pytest.raises(ValueError, match="sample 5 was there before"):
        read_train_records(tmp_path, 3)
