"""The order of the loop's calls, compared with the loop it follows, and its endings."""

import asyncio
import io
from pathlib import Path

import pytest

import limes.train as loop
from limes.config import Config, load_config
from limes.records import Sample
from limes.run import Console
from limes.run.tracking import Tracking, init_tracking

START = ["placements", "create manager", "create trainer", "onload_weights", "update_weights", "onload_kv"]
END = ["dispose manager", "dispose trainer"]
END_WITH_CRITIC = [*END, "dispose critic"]
PPO = {"algorithm.advantage_estimator": "ppo"}


def step(rollout_id: int, *, save: bool = False, last: bool = False) -> list[str]:
    """One colocated step."""
    saving = [f"save_model {rollout_id} sync={last}", f"save {rollout_id}"] if save or last else []
    return [
        f"generate {rollout_id}",
        "offload cuda_graph kv_cache",
        f"train {rollout_id}",
        *saving,
        "clear_memory",
        "onload_weights",
        "update_weights",
        "onload_kv",
    ]


def step_apart(rollout_id: int, *, last: bool = False) -> list[str]:
    """One step of a trainer whose engines have devices of their own."""
    saving = [f"save_model {rollout_id} sync={last}", f"save {rollout_id}"] if last else []
    return [f"generate {rollout_id}", f"train {rollout_id}", *saving, "clear_memory", "update_weights"]


def step_with_critic(
    rollout_id: int,
    *,
    critic_only: bool = False,
    save: bool = False,
    last: bool = False,
    kl: bool = False,
    room: tuple[str, ...] = (),
) -> list[str]:
    """One colocated step in which the critic is asked first and the actor gets its values.

    On common devices both make room by themselves; `room` is what is asked of a critic on its own.
    """
    asked = ["submit_kl", f"critic submit_train {rollout_id} with KL of {rollout_id}"]
    asked = asked if kl else [f"critic submit_train {rollout_id}"]
    trained = [] if critic_only else [f"train {rollout_id} with values of {rollout_id}"]
    saving = [] if critic_only else [f"save_model {rollout_id} sync={last}"]
    saving = [*saving, f"critic save_model {rollout_id} sync={last}", f"save {rollout_id}"] if save or last else []
    return [
        f"generate {rollout_id}",
        "offload cuda_graph kv_cache",
        *asked,
        *trained,
        f"critic finish_train {rollout_id}",
        *saving,
        *room,
        "onload_weights",
        "update_weights",
        "onload_kv",
    ]


class FakeManager:
    def __init__(self, calls: list[str], fail_in: str | None) -> None:
        self.calls = calls
        self.fail_in = fail_in

    def _record(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fail_in:
            raise RuntimeError(f"fault in {call}")

    async def generate(self, rollout_id: int) -> list[str]:
        self._record(f"generate {rollout_id}")
        return [f"shard of {rollout_id}"]

    async def eval(self, rollout_id: int) -> dict[str, float]:
        self._record(f"eval {rollout_id}")
        return {}

    async def show_samples(self, num: int) -> list[Sample]:
        self._record(f"show {num}")
        return []

    async def offload(self, tags: list[str]) -> None:
        self._record(f"offload {' '.join(tags)}")

    async def onload_weights(self) -> None:
        self._record("onload_weights")

    async def onload_kv(self) -> None:
        self._record("onload_kv")

    async def check_weights(self, action: str) -> None:
        self._record(f"check_weights {action}")

    async def save(self, rollout_id: int, folder: Path) -> None:
        self._record(f"save {rollout_id}")
        (folder / "rollout.json").touch()

    async def dispose(self) -> None:
        self._record("dispose manager")


class FakeTrainer:
    has_workers = True

    def __init__(self, calls: list[str], start_rollout_id: int, fail_in: str | None) -> None:
        self.calls = calls
        self.start_rollout_id = start_rollout_id
        self.fail_in = fail_in

    def _record(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fail_in:
            raise RuntimeError(f"fault in {call}")

    async def train(self, rollout_id: int, shards: list[str], external_data: list[str] | None = None) -> dict:
        assert shards == [f"shard of {rollout_id}"]
        self._record(" with ".join([f"train {rollout_id}", *(external_data or [])]))
        return {}

    def submit_kl(self, rollout_id: int, shards: list[str]) -> list[str]:
        assert shards == [f"shard of {rollout_id}"]
        self._record("submit_kl")
        return [f"KL of {rollout_id}"]

    async def update_weights(self) -> int:
        self._record("update_weights")
        return 1

    async def clear_memory(self) -> None:
        self._record("clear_memory")

    async def offload(self) -> None:
        self._record("offload trainer")

    async def save_model(self, rollout_id: int, folder: Path, force_sync: bool = False) -> None:
        (folder / "model").touch()
        self._record(f"save_model {rollout_id} sync={force_sync}")

    async def dispose(self) -> None:
        self._record("dispose trainer")


class FakeCritic:
    has_workers = True

    def __init__(self, calls: list[str], fail_in: str | None) -> None:
        self.calls = calls
        self.fail_in = fail_in

    def _record(self, call: str) -> None:
        self.calls.append(f"critic {call}")
        if self.calls[-1] == self.fail_in:
            raise RuntimeError(f"fault in critic {call}")

    def submit_train(self, rollout_id: int, shards: list[str], external_data: list[str] | None = None) -> list[str]:
        assert shards == [f"shard of {rollout_id}"]
        self._record(" with ".join([f"submit_train {rollout_id}", *(external_data or [])]))
        return [f"values of {rollout_id}"]

    async def finish_train(self, rollout_id: int, values: list[str]) -> None:
        assert values == [f"values of {rollout_id}"]
        self._record(f"finish_train {rollout_id}")

    async def offload(self) -> None:
        self._record("offload")

    async def save_model(self, rollout_id: int, folder: Path, force_sync: bool = False) -> None:
        self._record(f"save_model {rollout_id} sync={force_sync}")

    async def dispose(self) -> None:
        self.calls.append("dispose critic")


class Places(dict[str, str]):
    """Stands for the places of the roles."""

    def close(self) -> None:
        pass


class Trace:
    """Runs the loop with stand-ins for the roles and keeps its calls."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.folder = folder
        self.err = io.StringIO()
        self.configs: list[Config] = []
        self.tracking: Tracking | None = None
        self.monkeypatch = monkeypatch

    def __call__(
        self, *, per_epoch: int | None = None, start: int = 0, fail_in: str | None = None, **overrides: object
    ) -> list[str]:
        calls = self.calls

        def create_placement_groups(config: Config, tracking: Tracking) -> Places:
            calls.append("placements")
            return Places(rollout="its place")

        async def create_rollout_manager(config: Config, placement: str, tracking: Tracking) -> tuple:
            assert placement == "its place"
            calls.append("create manager")
            return FakeManager(calls, fail_in), per_epoch

        async def create_training_models(config: Config, placements: dict, manager: FakeManager, tracking: Tracking):
            assert isinstance(manager, FakeManager)
            self.configs.append(config)
            calls.append("create trainer")
            if fail_in == "create trainer":
                raise ValueError("no such checkpoint")
            critic = FakeCritic(calls, fail_in) if config.algorithm.advantage_estimator == "ppo" else None
            return FakeTrainer(calls, start, fail_in), critic

        for stand_in in (create_placement_groups, create_rollout_manager, create_training_models):
            self.monkeypatch.setattr(loop, stand_in.__name__, stand_in)
        defaults = {"run.dir": str(self.folder), "run.num_shown_samples": 0}
        config = load_config(None, defaults | overrides)
        self.tracking = init_tracking(config, "trace", Console(out=io.StringIO(), err=self.err))
        asyncio.run(loop.train(config, self.tracking))
        return calls


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
    return Trace(tmp_path, monkeypatch)


def settings(**values: object) -> dict[str, object]:
    """Dotted names from keywords: `eval__interval` is `eval.interval`."""
    return {name.replace("__", "."): value for name, value in values.items()}


def test_a_plain_run(trace: Trace) -> None:
    calls = trace(**settings(rollout__num_rollout=3))
    assert calls == [*START, *step(0), *step(1), *step(2, last=True), *END]


def test_evaluation_comes_before_training_and_after_weights_have_changed(trace: Trace) -> None:
    calls = trace(**settings(rollout__num_rollout=3, eval__interval=2))
    assert calls == [*START, "eval 0", *step(0), *step(1), "eval 2", *step(2, last=True), *END]


def test_evaluation_before_training_can_be_skipped(trace: Trace) -> None:
    calls = trace(**settings(rollout__num_rollout=2, eval__interval=1, eval__skip_before_train=True))
    assert calls == [*START, *step(0), "eval 1", *step(1, last=True), "eval 2", *END]


def test_without_rollouts_it_evaluates_once_and_only_that(trace: Trace) -> None:
    calls = trace(**settings(rollout__num_rollout=0, run__num_shown_samples=3))
    assert calls == [*START, "eval 0", *END]


def test_saving_falls_due_by_interval_and_after_the_last(trace: Trace) -> None:
    calls = trace(**settings(rollout__num_rollout=5, checkpoint__save_interval=2))
    assert calls == [
        *START,
        *step(0),
        *step(1, save=True),
        *step(2),
        *step(3, save=True),
        *step(4, last=True),
        *END,
    ]


def test_epoch_ends_save_and_evaluate(trace: Trace) -> None:
    calls = trace(per_epoch=2, **settings(rollout__num_epoch=2, checkpoint__save_interval=9, eval__interval=9))
    assert calls == [
        *START,
        "eval 0",
        *step(0),
        *step(1, save=True),
        "eval 2",
        *step(2),
        *step(3, last=True),
        "eval 4",
        *END,
    ]


def test_the_trainer_is_told_how_long_the_run_is(trace: Trace) -> None:
    """Its schedule needs the number that only the manager's data can give."""
    trace(per_epoch=3, **settings(rollout__num_epoch=2))
    assert trace.configs[0].rollout.num_rollout == 6


def test_epochs_that_leave_the_policy_nothing_are_told_of(trace: Trace) -> None:
    trace(per_epoch=2, **PPO, **settings(rollout__num_epoch=1, critic__num_critic_only_steps=2))
    assert "critic.num_critic_only_steps = 2 leaves the policy none of the 2 rollouts" in trace.err.getvalue()


def test_a_checkpoint_is_continued_after_its_rollout_without_a_first_evaluation(trace: Trace) -> None:
    calls = trace(start=2, **settings(rollout__num_rollout=4, eval__interval=4))
    assert calls == [*START, *step(2), *step(3, last=True), "eval 4", *END]


@pytest.mark.parametrize("was_made", [False, True])
def test_an_evaluation_that_a_checkpoint_owes_comes_first(trace: Trace, tmp_path: Path, was_made: bool) -> None:
    """A save precedes the evaluation, so a run may end between the two."""
    checkpoint = tmp_path / "earlier" / "checkpoints" / "000001"
    if was_made:
        (tmp_path / "earlier" / "rollouts").mkdir(parents=True)
        (tmp_path / "earlier" / "rollouts" / "000002.eval.jsonl").touch()
    trace.monkeypatch.setattr(loop, "refuse_unusable_checkpoint", lambda config: None)
    calls = trace(start=2, **settings(rollout__num_rollout=3, eval__interval=2, checkpoint__load=str(checkpoint)))
    assert calls == [*START, *([] if was_made else ["eval 2"]), *step(2, last=True), *END]


def test_a_checkpoint_of_the_critic_alone_owes_no_evaluation(trace: Trace, tmp_path: Path) -> None:
    trace.monkeypatch.setattr(loop, "refuse_unusable_checkpoint", lambda config: None)
    options = settings(rollout__num_rollout=3, eval__interval=2, critic__num_critic_only_steps=2)
    calls = trace(start=2, **PPO, **options, **settings(checkpoint__load=str(tmp_path / "000001")))
    assert calls == [*START, *step_with_critic(2, last=True), *END_WITH_CRITIC]


def test_answers_are_shown_before_and_after(trace: Trace) -> None:
    calls = trace(**settings(rollout__num_rollout=1, run__num_shown_samples=2))
    assert calls == [*START, "show 2", *step(0, last=True), "show 2", *END]


def test_the_critic_goes_first_and_the_actor_gets_its_values(trace: Trace) -> None:
    calls = trace(**PPO, **settings(rollout__num_rollout=2, eval__interval=1))
    steps = [*step_with_critic(0), "eval 1", *step_with_critic(1, last=True), "eval 2"]
    assert calls == [*START, "eval 0", *steps, *END_WITH_CRITIC]


def test_the_critic_gets_the_actors_kl_where_the_reward_has_one(trace: Trace) -> None:
    calls = trace(**PPO, **settings(rollout__num_rollout=1, algorithm__kl_coef=0.1))
    assert calls == [*START, *step_with_critic(0, last=True, kl=True), *END_WITH_CRITIC]


RAY = {"cluster.kind": "ray", "model.device": "cpu"}
APART = RAY | {"cluster.colocate": False}
START_APART = ["placements", "create manager", "create trainer", "update_weights"]


def test_on_ray_colocated_is_the_same(trace: Trace) -> None:
    assert trace(**RAY, **settings(rollout__num_rollout=2)) == [*START, *step(0), *step(1, last=True), *END]


def test_engines_on_devices_of_their_own_keep_their_memory(trace: Trace) -> None:
    calls = trace(**APART, **settings(rollout__num_rollout=2, eval__interval=1, eval__skip_before_train=True))
    assert calls == [*START_APART, *step_apart(0), "eval 1", *step_apart(1, last=True), "eval 2", *END]


def test_eval_only_with_engines_apart(trace: Trace) -> None:
    assert trace(**APART, **settings(rollout__num_rollout=0)) == [*START_APART, "eval 0", *END]


def test_the_level_says_what_engines_let_go_of(trace: Trace) -> None:
    options = settings(rollout__num_rollout=1, cluster__offload_rollout_level=["kv_cache", "weight"])
    calls = trace(**RAY, **options)
    wanted = step(0, last=True)
    wanted[1] = "offload cuda_graph kv_cache weights"
    assert calls == [*START, *wanted, *END]


def test_a_trainer_that_leaves_the_device_leaves_after_saving(trace: Trace) -> None:
    calls = trace(**settings(rollout__num_rollout=1, cluster__offload_train=True))
    wanted = ["offload trainer" if call == "clear_memory" else call for call in step(0, last=True)]
    assert calls == [*START, *wanted, *END]


def test_a_critic_on_devices_of_its_own_leaves_by_itself_while_the_actor_has_not_come(trace: Trace) -> None:
    options = settings(rollout__num_rollout=2, critic__num_critic_only_steps=1, cluster__offload_train=True)
    calls = trace(**RAY, **PPO, **options, **settings(cluster__colocate_critic=False))
    first = step_with_critic(0, critic_only=True, room=("critic offload",))
    second = step_with_critic(1, last=True, room=("critic offload", "offload trainer"))
    assert calls == [*START, *first, *second, *END_WITH_CRITIC]


def test_critic_only_steps_leave_engines_apart_alone(trace: Trace) -> None:
    options = settings(rollout__num_rollout=2, critic__num_critic_only_steps=1, cluster__colocate_critic=False)
    calls = trace(**APART, **PPO, **options)
    drop = ("offload cuda_graph kv_cache", "onload_weights", "onload_kv")
    first, second = (
        [call for call in step_with_critic(number, room=("clear_memory",), **how) if call not in drop]
        for number, how in ((0, {"critic_only": True}), (1, {"last": True}))
    )
    first.remove("update_weights")
    assert calls == [*START_APART, *first, *second, *END_WITH_CRITIC]


def test_updates_are_checked_before_the_kv_cache_comes_back(trace: Trace) -> None:
    calls = trace(**RAY, **settings(rollout__num_rollout=0, weights__check_update_equal=True))
    assert calls == [*START[:-1], "check_weights compare", "onload_kv", "eval 0", *END]


def test_while_the_critic_learns_alone_the_actor_is_neither_trained_saved_nor_evaluated(trace: Trace) -> None:
    options = settings(rollout__num_rollout=4, critic__num_critic_only_steps=2, checkpoint__save_interval=2)
    calls = trace(**PPO, **options, **settings(eval__interval=1))
    assert calls == [
        *START,
        "eval 0",
        *step_with_critic(0, critic_only=True),
        *step_with_critic(1, critic_only=True, save=True),
        *step_with_critic(2),
        "eval 3",
        *step_with_critic(3, last=True),
        "eval 4",
        *END_WITH_CRITIC,
    ]


@pytest.mark.parametrize("fault", ["critic finish_train 0", "critic submit_train 1", "critic save_model 2 sync=True"])
def test_a_fault_of_the_critic_disposes_everything(trace: Trace, fault: str) -> None:
    with pytest.raises(RuntimeError, match=f"fault in {fault}"):
        trace(fail_in=fault, **PPO, **settings(rollout__num_rollout=3, critic__num_critic_only_steps=1))
    assert trace.calls[-4:] == [fault, *END_WITH_CRITIC]


@pytest.mark.parametrize(
    "fault", ["generate 1", "train 0", "save_model 2 sync=True", "save 2", "update_weights", "eval 0"]
)
def test_a_fault_anywhere_still_disposes_everything(trace: Trace, fault: str) -> None:
    with pytest.raises(RuntimeError, match=f"fault in {fault}"):
        trace(fail_in=fault, **settings(rollout__num_rollout=3, eval__interval=1))
    assert trace.calls[-2:] == END
    assert trace.calls[-3] == fault


def test_a_trainer_that_cannot_be_made_leaves_no_manager_behind(trace: Trace) -> None:
    with pytest.raises(ValueError, match="no such checkpoint"):
        trace(fail_in="create trainer", **settings(rollout__num_rollout=3))
    assert trace.calls[-1] == "dispose manager"


def test_a_fault_while_disposing_is_told_and_hides_nothing(trace: Trace) -> None:
    trace(fail_in="dispose manager", **settings(rollout__num_rollout=1))
    assert trace.calls[-2:] == END
    assert "fault in dispose manager" in trace.err.getvalue()


def test_checkpoints_are_whole_or_absent(trace: Trace) -> None:
    """A save that fails half-way leaves neither a folder with a plain number nor a half one."""
    with pytest.raises(RuntimeError, match="fault in save 1"):
        trace(fail_in="save 1", **settings(rollout__num_rollout=3, checkpoint__save_interval=1))
    assert trace.tracking is not None
    checkpoints = trace.tracking.folder.checkpoints
    assert [folder.name for folder in checkpoints.iterdir()] == ["000000"]
    assert sorted(file.name for file in (checkpoints / "000000").iterdir()) == ["model", "rollout.json"]
