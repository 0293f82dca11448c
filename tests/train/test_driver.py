"""What a driver does around its loop: exit codes, the run folder, the last line."""

import asyncio
import signal
import threading
from pathlib import Path

import pytest

from limes.checkpoints import save_checkpoint
from limes.config import Config, Resolved, load_config
from limes.driver import run_to_the_end
from limes.engine.protocol import EngineError
from limes.run.tracking import Tracking, describe_evaluation


def resolved(folder: Path, **values: object) -> Resolved:
    overrides = {"rollout.num_rollout": 1, "run.dir": str(folder), "run.name": "r"} | values
    return Resolved(load_config(None, overrides), {})


async def one_step(config: Config, tracking: Tracking) -> None:
    tracking.step_begins(0)
    tracking.record(0, {"rollout/reward_mean": 0.5})
    tracking.step_ends(0)


def test_a_run_that_ends_well_gives_0_and_says_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run_to_the_end(one_step, resolved(tmp_path), default_name="x") == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith(f"done; run folder: {tmp_path / 'r'}, reward curve: ")
    assert (tmp_path / "r" / "reward.png").stat().st_size > 1000
    assert "0.500" in captured.out
    assert load_config(tmp_path / "r" / "config.toml") == resolved(tmp_path).config


def test_ctrl_c_gives_130_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    async def interrupted(config: Config, tracking: Tracking) -> None:
        await one_step(config, tracking)
        raise KeyboardInterrupt

    assert run_to_the_end(interrupted, resolved(tmp_path), default_name="x") == 130
    assert capsys.readouterr().err.splitlines()[-1] == f"interrupted; run folder: {tmp_path / 'r'}"


def test_a_run_that_fails_gives_1_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    async def failing(config: Config, tracking: Tracking) -> None:
        await one_step(config, tracking)
        raise EngineError("the engine died: out of pages")

    assert run_to_the_end(failing, resolved(tmp_path), default_name="x") == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"failed: the engine died: out of pages; run folder: {tmp_path / 'r'}"


def test_settings_that_cannot_work_leave_no_folder_and_their_name_free(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    async def refusing(config: Config, tracking: Tracking) -> None:
        assert (tmp_path / "r" / "config.toml").exists()
        raise ValueError("data.prompt_data = x: no such file")

    for _ in range(2):
        with pytest.raises(ValueError, match="no such file"):
            run_to_the_end(refusing, resolved(tmp_path), default_name="x")
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""


def test_an_unforeseen_fault_keeps_its_traceback_and_what_was_written(tmp_path: Path) -> None:
    async def broken(config: Config, tracking: Tracking) -> None:
        await one_step(config, tracking)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_to_the_end(broken, resolved(tmp_path), default_name="x")
    assert (tmp_path / "r" / "metrics.jsonl").stat().st_size > 0


def test_an_older_run_is_never_written_into(tmp_path: Path) -> None:
    """U84."""
    assert run_to_the_end(one_step, resolved(tmp_path), default_name="x") == 0
    before = (tmp_path / "r" / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match=r"run\.name = 'r'.*exists already"):
        run_to_the_end(one_step, resolved(tmp_path), default_name="x")
    assert (tmp_path / "r" / "metrics.jsonl").read_text() == before


def test_the_recipe_names_the_run(tmp_path: Path) -> None:
    settings = resolved(tmp_path, **{"run.name": None})
    run_to_the_end(one_step, Resolved(settings.config, {}, Path("recipes/quick.toml")), default_name="x")
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("quick-")


def test_cancelling_the_loop_is_not_mistaken_for_its_end(tmp_path: Path) -> None:
    async def cancelled(config: Config, tracking: Tracking) -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run_to_the_end(cancelled, resolved(tmp_path), default_name="x")


def test_a_run_starts_where_an_event_loop_runs_already(tmp_path: Path) -> None:
    """As in a notebook; its errors and its exit code arrive as anywhere."""

    async def failing(config: Config, tracking: Tracking) -> None:
        await asyncio.sleep(0)
        raise EngineError("no more")

    async def cell() -> list[int]:
        first = run_to_the_end(one_step, resolved(tmp_path / "a"), default_name="x")
        return [first, run_to_the_end(failing, resolved(tmp_path / "b"), default_name="x")]

    assert asyncio.run(cell()) == [0, 1]


def test_ctrl_c_in_a_notebook_ends_the_run_in_order(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    ended = []

    async def waiting(config: Config, tracking: Tracking) -> None:
        await one_step(config, tracking)
        try:
            await asyncio.sleep(0.1)  # the notebook's thread waits by now
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    async def cell() -> int:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as a notebook has it
        try:
            return run_to_the_end(waiting, resolved(tmp_path), default_name="x")
        finally:
            signal.signal(signal.SIGINT, before)

    assert asyncio.run(cell()) == 130
    assert ended == [True]
    assert capsys.readouterr().err.splitlines()[-1] == f"interrupted; run folder: {tmp_path / 'r'}"


def test_cancelling_waits_for_a_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    said: list[str] = []
    under_way, go_on = asyncio.Event(), asyncio.Event()

    class Slow:
        has_workers = True

        async def save_model(self, rollout_id: int, folder: Path, force_sync: bool = False) -> None:
            under_way.set()
            await go_on.wait()
            (folder / "model").touch()

        async def save(self, rollout_id: int, folder: Path) -> None:
            (folder / "rollout.json").touch()

    async def main() -> None:
        saving = asyncio.create_task(
            save_checkpoint([Slow()], Slow(), 3, tmp_path, force_sync=False, notice=said.append)  # type: ignore[list-item, arg-type]
        )
        await under_way.wait()
        saving.cancel()
        await asyncio.sleep(0)
        assert said == ["waiting for checkpoint 000003 to be written"]
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await saving

    asyncio.run(main())
    assert sorted(path.name for path in (tmp_path / "000003").iterdir()) == ["model", "rollout.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["000003"]


def test_an_evaluation_is_described_with_its_intervals() -> None:
    metrics = {
        "eval/reward_mean": 0.5,
        "eval/reward_ci95": 0.125,
        "eval/pass_at_1": 0.25,
        "eval/pass_at_1_low": 0.1,
        "eval/pass_at_1_high": 0.4,
    }
    assert describe_evaluation(metrics) == "reward 0.500 +- 0.125, pass@1 0.250 [0.100, 0.400]"
    assert describe_evaluation({"eval/unscored": 4.0}) == "no answer has a reward"
