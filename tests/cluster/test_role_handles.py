"""What the loop holds of its roles: dependencies between workers, reports to one place."""

import asyncio
import io
import threading
from pathlib import Path

import pytest

from limes.cluster.handles import CriticGroup, RolloutManagerHandle, TrainGroup
from limes.cluster.local import LocalActor
from limes.config import load_config
from limes.rollout import Report
from limes.run import Console, read_metrics
from limes.run.tracking import Tracking, init_tracking


class Worker:
    """A train worker that notes what it was given."""

    def __init__(self, name: str, diary: list[tuple], gate: threading.Event | None = None) -> None:
        self.name, self.diary, self.gate = name, diary, gate
        self.version = 0

    def train(self, rollout_id: int, shard: str, values: str | None = None) -> object:
        if self.gate is not None:
            assert self.gate.wait(30)
        self.diary.append((self.name, rollout_id, shard, values))
        if shard == "bad":
            raise ValueError(f"{self.name} cannot train on it")
        return f"values of {self.name}" if self.name.startswith("critic") else {"train/loss": 0.5}

    def report(self) -> dict[str, float]:
        return {"train/value_loss": 0.25}

    async def update_weights(self) -> int:
        self.version += 1
        return self.version

    def clear_memory(self) -> None:
        self.diary.append((self.name, "clear_memory"))

    def save_model(self, rollout_id: int, folder: Path, force_sync: bool = False) -> None:
        self.diary.append((self.name, "save", rollout_id, folder, force_sync))


class Manager:
    """A rollout manager with two rollouts to tell of."""

    def generate(self, rollout_id: int) -> list[str]:
        return [f"shard {rollout_id}"]

    def report(self) -> Report:
        return Report({"rollout/reward_mean": 0.5}, ["3 of 8 answers failed"])

    async def eval(self, rollout_id: int) -> Report:
        return Report({"eval/reward_mean": 0.25, "eval/reward_ci95": 0.1})

    async def dispose(self) -> None:
        raise OSError("cannot close")


@pytest.fixture
def err() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def tracking(tmp_path: Path, err: io.StringIO) -> Tracking:
    config = load_config(None, {"rollout.num_rollout": 1, "run.dir": str(tmp_path)})
    return init_tracking(config, "handles", Console(out=io.StringIO(), err=err))


def test_the_actor_starts_when_the_critics_values_are_there(tracking: Tracking) -> None:
    """Both are submitted at once and the loop waits for neither; each actor worker gets its own critic's values."""
    diary: list[tuple] = []
    gate = threading.Event()
    critics = [LocalActor(f"critic{i}", lambda i=i: Worker(f"critic{i}", diary, gate)) for i in range(2)]
    actors = [LocalActor(f"actor{i}", lambda i=i: Worker(f"actor{i}", diary)) for i in range(2)]
    critic, actor = CriticGroup(critics, tracking), TrainGroup(actors, tracking)

    async def main() -> list:
        values = critic.submit_train(3, ["a", "b"])
        training = asyncio.create_task(actor.train(3, ["a", "b"], external_data=values))
        await asyncio.sleep(0)
        assert diary == []
        gate.set()
        metrics = [await training, await critic.finish_train(3, values)]
        await critic.dispose()
        await actor.dispose()
        return metrics

    assert asyncio.run(main()) == [{"train/loss": 0.5}, {"train/value_loss": 0.25}]
    tracking.finish("done")
    told = [{k: v for k, v in line.items() if k != "time"} for line in read_metrics(tracking.folder.metrics)]
    assert told == [{"step": 3, "train/loss": 0.5}, {"step": 3, "train/value_loss": 0.25}]
    spans = tracking.folder.spans.read_text()
    assert all(f'"name":"{name}"' in spans for name in ("actor.train", "critic.report"))
    assert sorted(diary) == [
        ("actor0", 3, "a", "values of critic0"),
        ("actor1", 3, "b", "values of critic1"),
        ("critic0", 3, "a", None),
        ("critic1", 3, "b", None),
    ]


def test_a_failing_critic_fails_the_actors_training_by_name(tracking: Tracking) -> None:
    critic = CriticGroup([LocalActor("critic", lambda: Worker("critic", []))], tracking)
    actor = TrainGroup([LocalActor("actor", lambda: Worker("actor", []))], tracking)

    async def main() -> None:
        try:
            await asyncio.gather(*actor.submit_train(0, ["good"], external_data=critic.submit_train(0, ["bad"])))
        finally:
            await critic.dispose()
            await actor.dispose()

    with pytest.raises(ValueError, match="critic cannot train on it") as caught:
        asyncio.run(main())
    assert "(in role 'critic', call 'train')" in caught.value.__notes__


def test_a_critic_that_fails_alone_is_not_waited_for_in_vain(tracking: Tracking) -> None:
    critic = CriticGroup([LocalActor("critic", lambda: Worker("critic", []))], tracking)

    async def main() -> None:
        try:
            await critic.finish_train(0, critic.submit_train(0, ["bad"]))
        finally:
            await critic.dispose()

    with pytest.raises(ValueError, match="critic cannot train on it"):
        asyncio.run(main())


def test_all_workers_get_every_call(tracking: Tracking, tmp_path: Path) -> None:
    diary: list[tuple] = []
    group = TrainGroup([LocalActor(f"w{i}", lambda i=i: Worker(f"w{i}", diary)) for i in range(2)], tracking)

    async def main() -> list[int]:
        await group.clear_memory()
        await group.save_model(4, tmp_path, force_sync=True)
        versions = [await group.update_weights() for _ in range(2)]
        await group.dispose()
        return versions

    assert asyncio.run(main()) == [1, 2]
    assert sorted(diary) == [
        (name, *call) for name in ("w0", "w1") for call in (("clear_memory",), ("save", 4, tmp_path, True))
    ]


def test_reports_reach_metrics_and_console_in_order(tracking: Tracking, err: io.StringIO) -> None:
    """U121: one writer, steps never go backwards, an evaluation has the step of the rollout it comes before."""
    tracking.num_rollout = 2
    manager = RolloutManagerHandle(LocalActor("rollout", Manager), tracking)
    actor = TrainGroup([LocalActor("actor", lambda: Worker("actor", []))], tracking)

    async def main() -> None:
        for rollout_id in range(2):
            await manager.eval(rollout_id)
            tracking.step_begins(rollout_id)
            await actor.train(rollout_id, await manager.generate(rollout_id))
            tracking.step_ends(rollout_id)
        await manager.eval(2)
        with pytest.raises(OSError, match="cannot close"):
            await manager.dispose()
        await actor.dispose()

    asyncio.run(main())
    tracking.finish("done")
    lines = list(read_metrics(tracking.folder.metrics))
    told = [
        (line["step"], next(iter(set(line) - {"step", "time"}))) for line in lines if "eval/reward_ci95" not in line
    ]
    assert [line["step"] for line in lines] == [0] * 4 + [1] * 4 + [2]
    assert [name for _, name in told] == ["rollout/reward_mean", "train/loss", "perf/step_time_s"] * 2
    assert "rollout 1: 3 of 8 answers failed" in err.getvalue()
    assert "evaluation before rollout 2: reward 0.250 +- 0.100" in err.getvalue()
    spans = tracking.folder.spans.read_text()
    assert all(f'"name":"{name}"' in spans for name in ("rollout.generate", "actor.train", "rollout.dispose"))


def test_a_role_that_never_came_up_is_ended_without_asking_it(tracking: Tracking) -> None:
    def build() -> Manager:
        raise FileNotFoundError("no model")

    actor = LocalActor("rollout", build)

    async def main() -> None:
        try:
            await actor.ready()
        finally:
            await RolloutManagerHandle(actor, tracking).dispose()

    with pytest.raises(FileNotFoundError, match="no model"):
        asyncio.run(main())
