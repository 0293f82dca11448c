"""Hand-over between processes, and what is left when one of them is killed."""

import gc
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from engine_cases import PROMPTS, full_log_probs, request
from tiny import tiny_model
from weight_cases import (
    MOVING,
    TIMEOUT_S,
    EngineProcess,
    ProcessFacts,
    open_memory,
    same_bits,
    sender_of,
    shared_segments,
    start_process,
    trained_policy,
)

from limes.weights import (
    ModuleSource,
    PipePeer,
    WeightError,
    WeightReceiver,
    check_update,
    differing_weights,
    serve_pipe,
)
from limes.weights.files import OwnedFolder, remove_abandoned


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def engine(request):
    found = EngineProcess(tied=request.param)
    found.tied = request.param
    yield found
    found.close()


@pytest.mark.parametrize("transport", MOVING)
def test_after_an_update_the_other_process_samples_with_the_trainers_weights(engine, transport, tmp_path):
    trainer = trained_policy(MOVING.index(transport) + 5, engine.tied)
    source = ModuleSource(trainer.model)
    sender = sender_of(transport, tmp_path / "weights")
    segments = shared_segments()
    sender.connect(source, [engine.peer])
    first = sender._peers[0].ask(ProcessFacts()).result(TIMEOUT_S)
    version = 100 * (MOVING.index(transport) + 1)
    for step in range(3):
        with torch.no_grad():
            for weight in trainer.model.parameters():
                weight.add_(0.01)
        report = sender.update(source, version + step)
        assert differing_weights(sender, source) == {}
        for index, prompt in enumerate(PROMPTS):
            asked = request(f"{transport}-{step}-{index}", prompt, index=index)
            result = engine.answer(asked)
            assert set(result.weight_versions) == {version + step}
            assert result.log_probs == pytest.approx(full_log_probs(trainer, asked, result), abs=1e-4)
    assert report.num_weights == len(source.specs) == first[1]
    assert check_update(sender, source, version + 3) == {}
    assert engine.peer.ask(ProcessFacts()).result(TIMEOUT_S) == (engine.tied, len(source.specs))
    sender.close()
    assert shared_segments() <= segments
    assert not (tmp_path / "weights").exists()


@pytest.mark.parametrize("transport", MOVING)
def test_a_killed_engine_is_one_error_with_its_name_and_leaves_nothing(transport, tmp_path):
    segments, threads = shared_segments(), set(threading.enumerate())
    engines = [EngineProcess(seed=seed, name=f"engine {seed}") for seed in (1, 2)]
    source = ModuleSource(tiny_model())
    sender = sender_of(transport, tmp_path / "weights", timeout_s=20.0)
    sender.connect(source, [engine.peer for engine in engines])
    sender.update(source, 1)
    with pytest.raises(WeightError, match=r"engine 2 is gone"):
        sender.update(KillsAfter(source, engines[1].process.pid, after=3), 2)
    engines[1].kill()
    sender.connect(source, [engines[0].peer])
    sender.update(source, 2)
    assert differing_weights(sender, source) == {}
    sender.close()
    for engine in engines:
        engine.close()
    gc.collect()
    assert shared_segments() <= segments
    assert set(threading.enumerate()) <= threads
    assert open_memory() == []
    assert not (tmp_path / "weights").exists()


class KillsAfter:
    """A source that kills a process once it has given some tensors."""

    def __init__(self, source, pid, after):
        self._source, self._pid, self._after = source, pid, after

    @property
    def specs(self):
        return self._source.specs

    def tensors(self):
        for number, item in enumerate(self._source.tensors()):
            if number == self._after:
                os.kill(self._pid, signal.SIGKILL)
            yield item


def send_until_killed(connection, transport: str, folder: str) -> None:
    """Body of a trainer process that dies in the middle of its second update."""
    torch.set_num_threads(1)
    source = ModuleSource(tiny_model())
    sender = sender_of(transport, Path(folder))
    sender.connect(source, [PipePeer(connection)])
    sender.update(source, 1)
    sender.update(KillsAfter(source, os.getpid(), after=9), 2)


@pytest.mark.parametrize("transport", MOVING)
def test_a_killed_trainer_leaves_nothing_and_its_engine_knows_what_it_has(transport, tmp_path):
    segments, threads = shared_segments(), set(threading.enumerate())
    model = tiny_model(seed=1)
    receiver = WeightReceiver(model)
    root = tmp_path / "weights"
    process, connection = start_process(send_until_killed, transport, str(root))
    serve_pipe(connection, receiver.handle)  # until the trainer is gone
    process.join(TIMEOUT_S)
    assert process.exitcode == -signal.SIGKILL
    assert receiver.version == 1
    assert receiver.intact == (transport in ("disk", "delta"))
    receiver.close()
    if transport in ("disk", "delta"):
        assert same_bits(model.state_dict(), tiny_model().state_dict())
        assert len(remove_abandoned(root)) == 1
    if root.exists():
        assert list(root.iterdir()) == []
    del model, receiver
    gc.collect()
    assert shared_segments() <= segments
    assert set(threading.enumerate()) <= threads
    assert open_memory() == []


def test_the_folder_of_a_living_process_is_not_abandoned(tmp_path):
    mine = OwnedFolder(tmp_path / "weights")
    with mine.new("v1") as path:
        (path / "file").write_text("text")
    assert remove_abandoned(tmp_path / "weights") == []
    other = OwnedFolder(tmp_path / "weights")
    assert (mine.path / "v1" / "file").read_text() == "text"
    other.close()
    other.close()
    mine.close()
    assert not mine.path.exists()


def test_what_is_written_in_part_never_gets_its_name(tmp_path):
    folder = OwnedFolder(tmp_path / "weights")
    with folder.new("v1") as path:
        (path / "file").write_text("old")
    with pytest.raises(FileNotFoundError), folder.new("v1") as path:
        (path / "missing" / "file").write_text("new")
    assert [p.name for p in folder.path.iterdir()] == ["v1"]
    assert (folder.path / "v1" / "file").read_text() == "old"
    folder.close()


def test_a_message_that_cannot_be_sent_or_answered_is_an_error_and_the_pipe_goes_on():
    engine = EngineProcess()
    with pytest.raises((TypeError, AttributeError)):
        engine.peer.ask(threading.Lock())
    with pytest.raises(WeightError, match="AttributeError"):
        engine.peer.ask("no message").result(TIMEOUT_S)
    assert engine.peer.ask(ProcessFacts()).result(TIMEOUT_S)[0] is True
    engine.close()
    with pytest.raises(WeightError, match="engine is gone"):
        engine.peer.ask(ProcessFacts()).result(TIMEOUT_S)
