"""Each way to hand weights over, within this process: bits, names, versions, and nothing left behind."""

import gc
import threading
from contextlib import ExitStack

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load_file
from tiny import tiny_model
from weight_cases import MOVING, noise_like, open_memory, peer_of, same_bits, sender_of, shared_segments, weight_sets

from limes.weights import (
    LocalPeer,
    ModuleSource,
    TensorSpec,
    WeightError,
    WeightReceiver,
    check_update,
    differing_weights,
    drain,
    named_weights,
)
from limes.weights.disk import TYPES

FILE_TYPES = list(TYPES)
ON_DISK = [t for t in FILE_TYPES if t not in (torch.uint16, torch.uint32, torch.uint64)]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path):
    before, threads = shared_segments(), set(threading.enumerate())
    yield
    gc.collect()  # tracebacks hold tensors, and those their memory
    assert shared_segments() <= before
    assert set(threading.enumerate()) <= threads
    assert open_memory() == []
    assert not (tmp_path / "weights").exists()


@pytest.mark.parametrize("transport", MOVING)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(weights=weight_sets(ON_DISK))
def test_the_engine_gets_the_same_bits(tmp_path, transport, weights):
    engine = noise_like(weights)
    receiver = WeightReceiver(engine)
    sender = sender_of(transport, tmp_path / "weights", bucket_bytes=64)
    with peer_of(receiver, transport) as peer:
        sender.connect(ModuleSource(weights), [peer])
        for version in (1, 2, 3):
            report = sender.update(ModuleSource(weights), version)
            assert same_bits(engine, weights)
            assert (receiver.version, report.version, report.kind) == (version, version, transport)
            weights = noise_like(weights, seed=version)
        sender.close()
    receiver.close()


@pytest.mark.parametrize("transport", MOVING)
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_goes_to_several_engines_and_tied_weights_once(tmp_path, transport, tied):
    model = tiny_model("qwen2", tied=tied)
    engines = [tiny_model("qwen2", tied=tied, seed=seed) for seed in (1, 2)]
    receivers = [WeightReceiver(engine) for engine in engines]
    source = ModuleSource(model)
    assert ("lm_head.weight" in source.specs) is not tied
    sender = sender_of(transport, tmp_path / "weights")
    with ExitStack() as stack:
        peers = [stack.enter_context(peer_of(r, transport, f"engine {i}")) for i, r in enumerate(receivers)]
        sender.connect(source, peers)
        report = sender.update(source, 1)
        assert differing_weights(sender, source) == {}
        with torch.no_grad():
            model.model.norm.weight.mul_(2)
        assert differing_weights(sender, source) == {f"engine {i}": ["model.norm.weight"] for i in range(2)}
        sender.update(source, 2)
        sender.close()
    for engine, receiver in zip(engines, receivers, strict=True):
        assert same_bits(engine.state_dict(), model.state_dict())
        assert (engine.lm_head.weight.data_ptr() == engine.model.embed_tokens.weight.data_ptr()) is tied
        receiver.close()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert size <= report.num_bytes < size + 5000  # files have a header
    assert report.num_weights == len(source.specs)
    assert {name.split("/")[0] for name in report.metrics()} == {"perf"}


@pytest.mark.parametrize("transport", MOVING)
def test_check_weights_finds_what_an_update_does_not_reach(tmp_path, transport):
    model = tiny_model()
    engine = tiny_model(seed=1)
    receiver = WeightReceiver(engine)
    source = ModuleSource(model)
    sender = sender_of(transport, tmp_path / "weights")
    with peer_of(receiver, transport) as peer:
        sender.connect(source, [peer])
        sender.update(source, 1)
        assert check_update(sender, source, 1) == {}
        assert same_bits(engine.state_dict(), model.state_dict())
        sender.check_weights("snapshot")
        sender.check_weights("scramble")
        assert not receiver.intact
        sender.update(source, 2)
        with torch.no_grad():
            engine.model.norm.weight[3] = -engine.model.norm.weight[3]
        assert sender.check_weights("compare") == {"engine": ["model.norm.weight"]}
        with pytest.raises(WeightError, match="nothing to compare with"):
            sender.check_weights("compare")
        with pytest.raises(WeightError, match="unknown action 'reset'"):
            sender.check_weights("reset")
        sender.close()
    receiver.close()


def test_scrambling_changes_every_weight():
    engine = tiny_model()
    receiver = WeightReceiver(engine)
    receiver.check_weights("snapshot")
    assert receiver.check_weights("scramble") == []
    assert receiver.check_weights("compare") == list(receiver.weights)


@pytest.mark.parametrize("transport", MOVING)
def test_ten_updates_and_the_checksums_agree_after_each(tmp_path, transport):
    model = tiny_model(num_layers=1)
    receiver = WeightReceiver(tiny_model(num_layers=1, seed=1))
    source = ModuleSource(model)
    sender = sender_of(transport, tmp_path / "weights")
    with peer_of(receiver, transport) as peer:
        sender.connect(source, [peer])
        for version in range(1, 11):
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(1e-3)
            sender.update(source, version)
            assert differing_weights(sender, source) == {}
        sender.close()
    receiver.close()


# Names, shapes and versions

FAULTS = [
    ({"a": (2, torch.float32), "b": (3, torch.float32)}, r"sends weights that engine does not take: b"),
    ({}, r"sends nothing for weights of engine: a"),
    ({"a": (3, torch.float32)}, r"sends a as \[3\] float32, where engine has \[2\] float32"),
    ({"a": (2, torch.bfloat16)}, r"sends a as \[2\] bfloat16, where engine has \[2\] float32"),
]


@pytest.mark.parametrize("transport", ["shared", *MOVING])
@pytest.mark.parametrize(("sent", "message"), FAULTS)
def test_weights_that_do_not_fit_are_errors_with_their_names(tmp_path, transport, sent, message):
    engine = {"a": torch.ones(2)}
    receiver = WeightReceiver(engine)
    sender = sender_of(transport, tmp_path / "weights")
    source = ModuleSource({name: torch.zeros(size, dtype=dtype) for name, (size, dtype) in sent.items()})
    with pytest.raises(WeightError, match=message):
        sender.connect(source, [LocalPeer(receiver)])
    with pytest.raises(WeightError, match="no engine is connected"):
        sender.update(source, 1)
    assert engine["a"].tolist() == [1, 1]


class Misleading:
    """A source that sends something else than it announced."""

    def __init__(self, specs, tensors):
        self.specs, self._tensors = specs, tensors

    def tensors(self):
        yield from self._tensors


A, B = torch.zeros(2), torch.zeros(3)
LIES = [
    ([("a", A)], "announced b, but did not send it"),
    ([("a", A), ("b", B), ("c", B)], "sends c where it announced the end"),
    ([("b", B), ("a", A)], "sends b where it announced a"),
    ([("a", A), ("b", A)], r"sends b as \[2\] float32, but announced \[3\] float32"),
    ([("a", A), ("a", A)], "sends a where it announced b"),
]


@pytest.mark.parametrize("transport", MOVING)
@pytest.mark.parametrize(("tensors", "message"), LIES)
def test_a_source_that_sends_something_else_than_it_announced_ends_the_update(tmp_path, transport, tensors, message):
    specs = {"a": TensorSpec.of(A), "b": TensorSpec.of(B)}
    engine = {"a": torch.ones(2), "b": torch.ones(3)}
    receiver = WeightReceiver(engine)
    sender = sender_of(transport, tmp_path / "weights", bucket_bytes=4)
    good = ModuleSource({"a": A, "b": B})
    with peer_of(receiver, transport) as peer:
        sender.connect(good, [peer])
        with pytest.raises(WeightError, match=message):
            sender.update(Misleading(specs, tensors), 1)
        assert receiver.version == 0
        # files are whole before an engine reads them, and a bucket is before it is sent
        assert receiver.intact == (
            transport in ("disk", "delta") or (transport == "broadcast" and tensors[0][0] == "b")
        )
        sender.connect(good, [peer])
        sender.update(good, 1)
        assert (receiver.version, receiver.intact) == (1, True)
        assert same_bits(engine, {"a": A, "b": B})
        sender.close()
    receiver.close()


@pytest.mark.parametrize("transport", MOVING)
def test_versions_never_fall(tmp_path, transport):
    engine = {"a": torch.ones(2)}
    receiver = WeightReceiver(engine)
    source = ModuleSource({"a": A})
    sender = sender_of(transport, tmp_path / "weights")
    with peer_of(receiver, transport) as peer:
        sender.connect(source, [peer])
        sender.update(source, 5)
        with pytest.raises(ValueError, match="weight version 4 is older than the last one handed over, 5"):
            sender.update(source, 4)
        sender.version = 0
        engine["a"].fill_(3)
        with pytest.raises(WeightError, match="weight version 4 is older than the engine's 5"):
            sender.update(source, 4)
        assert engine["a"].tolist() == [3, 3]
        assert (receiver.version, receiver.intact) == (5, True)
        sender.close()
    receiver.close()


def test_messages_outside_of_an_update_are_refused():
    receiver = WeightReceiver({"a": torch.ones(2)})
    with pytest.raises(WeightError, match="outside of an update"):
        receiver.writing()
    receiver.begin(1)
    with pytest.raises(WeightError, match="weight version 2 ends, but the update that began is 1"):
        receiver.finish(2)


def test_names_that_mean_the_same_memory_are_one_weight():
    base = torch.arange(6.0)
    state = {"first": base, "again": base.view(6), "other": base.view(2, 3), "part": base[:3], "copy": base.clone()}
    assert list(named_weights(state)) == ["first", "other", "part", "copy"]
    empty = torch.empty(0)
    assert list(named_weights({"a": empty, "b": torch.empty(0)})) == ["a", "b"]


def test_a_source_can_send_another_type_and_be_drained():
    source = ModuleSource({"a": torch.ones(2), "n": torch.ones(2, dtype=torch.int64)}, dtype=torch.bfloat16)
    assert [str(spec) for spec in source.specs.values()] == ["[2] bfloat16", "[2] int64"]
    assert {name: TensorSpec.of(tensor) for name, tensor in source.tensors()} == source.specs
    drain(source)


# What is special to one of them


def test_shared_weights_move_no_byte_and_must_be_the_trainers_own(tmp_path):
    model = tiny_model()
    receiver = WeightReceiver(model, own_weights=False)
    source = ModuleSource(model)
    sender = sender_of("shared", tmp_path)
    sender.connect(source, [LocalPeer(receiver)])
    report = sender.update(source, 1)
    assert (report.num_bytes, report.limit_share, receiver.version) == (0, None, 1)
    assert "perf/update_weights_limit_share" not in report.metrics()
    with pytest.raises(WeightError, match="cannot scramble weights that are the trainer's own"):
        check_update(sender, source, 2)
    with pytest.raises(WeightError, match=r"model\.norm\.weight of engine is not the trainer's own"):
        sender.update(ModuleSource({**model.state_dict(), "model.norm.weight": torch.ones(32)}), 2)
    sender.close()


def test_ipc_notices_weights_that_moved(tmp_path):
    engine = {"a": torch.ones(2)}
    receiver = WeightReceiver(engine)
    source = ModuleSource({"a": A})
    sender = sender_of("ipc", tmp_path)
    sender.connect(source, [LocalPeer(receiver)])
    engine["a"].data = torch.ones(2)
    with pytest.raises(WeightError, match="a moved in memory since the weights were shared"):
        sender.update(source, 1)
    assert receiver.intact
    sender.connect(source, [LocalPeer(receiver)])
    sender.update(source, 1)
    assert engine["a"].tolist() == [0, 0]
    receiver.set_link(None)
    with pytest.raises(WeightError, match="connect before the update"):
        sender.update(source, 2)
    sender.close()


def test_ipc_writes_into_the_tensors_that_the_engine_computes_with(tmp_path):
    """One copy: no memory of the transport's own between trainer and engine."""
    engine = torch.nn.Linear(3, 2)
    weight = engine.weight
    receiver = WeightReceiver(engine)
    source = ModuleSource(torch.nn.Linear(3, 2))
    sender = sender_of("ipc", tmp_path)
    sender.connect(source, [LocalPeer(receiver)])
    assert engine.weight is weight
    place = weight.data_ptr()
    sender.update(source, 1)
    assert weight.data_ptr() == place
    assert same_bits(dict(engine.named_parameters()), dict(source.tensors()))
    sender.close()
    receiver.close()
    assert engine(torch.ones(1, 3)).shape == (1, 2)  # the weights stay after both have let go


def test_files_that_are_kept_can_be_read_by_others(tmp_path):
    model = tiny_model(dtype=torch.bfloat16)
    receiver = WeightReceiver(tiny_model(dtype=torch.bfloat16, seed=1))
    source = ModuleSource(model)
    sender = sender_of("disk", tmp_path / "kept", keep_files=True)
    sender.connect(source, [LocalPeer(receiver)])
    sender.update(source, 1)
    sender.close()
    sender_of("disk", tmp_path / "kept").transport.folder.close()  # another sender does not take it for abandoned
    (file,) = (tmp_path / "kept").glob("*/v00000001/model.safetensors")
    assert same_bits(load_file(file), named_weights(model))


def test_a_file_of_another_version_is_refused(tmp_path):
    engine = {"a": torch.ones(2)}
    receiver = WeightReceiver(engine)
    sender = sender_of("disk", tmp_path / "weights")
    sender.connect(ModuleSource({"a": A}), [LocalPeer(receiver)])
    sender.transport.prepare(ModuleSource({"a": A}), 1)
    folder = sender.transport.folder.path
    (folder / "v00000001").rename(folder / "v00000002")
    receiver.begin(2)
    with pytest.raises(WeightError, match="holds version 1, not 2"):
        sender.transport.send(ModuleSource({"a": A}), 2)
    assert receiver.intact
    sender.close()
