"""An engine that takes updates between its steps: pauses, prefix cache, versions and log-probs."""

import asyncio

import pytest
import torch
from engine_cases import PROMPTS, Gate, drive, full_log_probs, request, start_engine
from weight_cases import sender_of, trained_policy

from limes.weights import EngineWeights, ModuleSource, WeightError, WeightReceiver
from limes.weights.messages import Abandon, Begin, Finish


class LoopPeer:
    """An engine on another event loop than the sender's thread."""

    name = "engine"

    def __init__(self, weights, loop):
        self._weights, self._loop = weights, loop

    def ask(self, message):
        return asyncio.run_coroutine_threadsafe(self._weights.handle(message), self._loop)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_an_update_while_answers_run(mode, tmp_path):
    trainer, policy = trained_policy(1, True), trained_policy(0, True)
    receiver = WeightReceiver(policy.model)
    source = ModuleSource(trainer.model)
    sender = sender_of("ipc", tmp_path)
    gate = Gate(4)

    async def main(engine):
        weights = EngineWeights(engine, receiver, pause_mode=mode)
        peer = LoopPeer(weights, asyncio.get_running_loop())
        await asyncio.to_thread(sender.connect, source, [peer])
        before = await engine.generate(request("before"))
        running = asyncio.create_task(engine.generate(request("running", PROMPTS[1]), gate))
        _, report = await gate.here(engine.flush_cache(), asyncio.to_thread(sender.update, source, 3))
        crossed = await running
        after = await engine.generate(request("after"))
        await asyncio.to_thread(sender.close)
        return before, crossed, after, report, await engine.health()

    before, crossed, after, report, health = drive(start_engine(policy), main)
    receiver.close()
    assert (health.paused, health.weight_version, report.version) == (False, 3, 3)
    assert set(before.weight_versions) == {0}
    assert set(after.weight_versions) == {3}
    assert after.log_probs == pytest.approx(full_log_probs(trainer, request("after"), after), abs=1e-4)
    assert crossed.weight_versions == sorted(crossed.weight_versions)
    if mode == "abort":
        assert set(crossed.weight_versions) == {0}
        assert len(crossed.token_ids) < 12
        return
    new = crossed.weight_versions.index(3)
    assert new >= 4
    assert len(crossed.token_ids) == 12
    ours = full_log_probs(trainer, request("running", PROMPTS[1]), crossed)[new:]
    agree = crossed.log_probs[new:] == pytest.approx(ours, abs=1e-4)
    assert agree == (mode == "retract")  # in place, the keys of the old weights stay


def test_no_cached_prefix_survives_an_update(tmp_path):
    trainer, policy = trained_policy(1, False), trained_policy(0, False)
    receiver = WeightReceiver(policy.model)
    source = ModuleSource(trainer.model)
    sender = sender_of("disk", tmp_path / "weights")

    async def main(engine):
        weights = EngineWeights(engine, receiver, pause_mode="in_place")
        await asyncio.to_thread(sender.connect, source, [LoopPeer(weights, asyncio.get_running_loop())])
        await engine.generate(request("a"))
        shared = engine.counters.num_shared_tokens
        await engine.generate(request("b"))
        assert engine.counters.num_shared_tokens > shared  # the prompt's pages were found again
        await asyncio.to_thread(sender.update, source, 1)
        shared = engine.counters.num_shared_tokens
        result = await engine.generate(request("c"))
        assert engine.counters.num_shared_tokens == shared
        assert result.log_probs == pytest.approx(full_log_probs(trainer, request("c"), result), abs=1e-4)

    drive(start_engine(policy), main)
    sender.close()


def test_an_engine_goes_on_after_a_failed_update_only_if_its_weights_are_whole():
    policy = trained_policy(0, True)
    receiver = WeightReceiver(policy.model)

    async def main(engine):
        weights = EngineWeights(engine, receiver, pause_mode="retract")
        await weights.handle(Begin(1))
        assert (await engine.health()).paused
        assert await weights.handle(Abandon()) is True
        assert not (await engine.health()).paused
        await weights.handle(Begin(1))
        receiver.writing()
        assert await weights.handle(Abandon()) is False
        assert (await engine.health()).paused
        await weights.handle(Begin(1))
        await weights.handle(Finish(1))
        health = await engine.health()
        assert (health.paused, health.weight_version) == (False, 1)
        with pytest.raises(WeightError, match="older than the engine's 1"):
            await weights.handle(Begin(0))

    drive(start_engine(policy), main)


def test_the_version_of_the_engine_and_of_its_weights_are_one(tmp_path):
    """A resumed trainer starts with a high version."""
    trainer, policy = trained_policy(1, True), trained_policy(0, True)
    receiver = WeightReceiver(policy.model)
    sender = sender_of("delta", tmp_path / "weights")
    source = ModuleSource(trainer.model)

    async def main(engine):
        weights = EngineWeights(engine, receiver, pause_mode="abort")
        await asyncio.to_thread(sender.connect, source, [LoopPeer(weights, asyncio.get_running_loop())])
        for version in (41, 42):
            with torch.no_grad():
                trainer.model.model.norm.weight.add_(0.01)
            report = await asyncio.to_thread(sender.update, source, version)
            assert await engine.weight_version() == receiver.version == version
        assert 0 < report.density < 0.1

    drive(start_engine(policy), main)
    sender.close()
