"""The optional sinks, each with its real package and no network."""

import builtins
import json
import sqlite3
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from limes.config.run import RunConfig
from limes.run import MetricLog, RunFolder, open_trackers
from limes.run.trackers import _wandb_mode

SETTINGS = {"trainer": {"lr": 1e-6, "warmup": None}, "run": {"trackers": ["x"]}}


@pytest.fixture
def no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("asked a question"))


def run_with(tracker: str, tmp_path: Path, notice=lambda text: None) -> RunFolder:
    """Log three steps, one of them not finite, and evaluations that lag behind."""
    run = RunConfig(dir=str(tmp_path / "runs"), name="mine", project="limes-test", trackers=[tracker])
    folder = RunFolder.create(run, "x")
    with MetricLog(folder.metrics, open_trackers(run, folder, SETTINGS, notice)) as log:
        for step in range(3):
            log.log({"train/loss": 2.0 * step if step != 1 else float("nan"), "train/lr": 1e-5}, step + 5)
            log.log({"eval/reward_mean": 0.5 * step}, step)
    assert log.failures == {}
    return folder


def test_tensorboard(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = run_with("tensorboard", tmp_path)
    events = EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("eval/reward_mean")] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert [event.step for event in events.Scalars("train/loss")] == [5, 6, 7]


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("trackio")
    store = tmp_path / "store"
    for module in ("trackio", "trackio.utils", "trackio.sqlite_storage"):
        monkeypatch.setattr(f"{module}.TRACKIO_DIR", store)  # read from the environment once, at import
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    told: list[str] = []
    run_with("trackio", tmp_path, told.append)
    assert told == ['trackio: look at the run with `trackio show --project "limes-test"`']
    assert capsys.readouterr().out == ""
    (database,) = store.glob("*.db")
    connection = sqlite3.connect(database)
    rows = [(step, json.loads(metrics)) for step, metrics in connection.execute("select step, metrics from metrics")]
    connection.close()
    assert [step for step, metrics in rows if "train/lr" in metrics] == [5, 6, 7]
    assert [metrics["eval/reward_mean"] for _, metrics in rows if "eval/reward_mean" in metrics] == [0.0, 0.5, 1.0]


@pytest.mark.slow
@pytest.mark.usefixtures("no_login")
def test_wandb_without_a_key_is_offline_and_says_so(tmp_path: Path):
    wandb = pytest.importorskip("wandb")
    told: list[str] = []
    folder = run_with("wandb", tmp_path, told.append)
    wandb.teardown()  # its helper process writes the last bytes after the run is finished
    assert len(told) == 1
    assert "offline" in told[0]
    (record,) = folder.path.glob("wandb/offline-run-*/run-*.wandb")
    content = record.read_bytes()
    for key in (b"eval/reward_mean", b"train/loss", b"trainer"):
        assert key in content


@pytest.mark.usefixtures("no_login")
def test_wandb_rows_bring_the_step_axis_of_their_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wandb = pytest.importorskip("wandb")
    rows: list[dict[str, float]] = []
    axes: dict[str, str] = {}
    fake = SimpleNamespace(
        define_metric=lambda name, step_metric=None, hidden=None: axes.update({name: step_metric}),
        log=rows.append,
        finish=lambda: None,
    )
    monkeypatch.setattr(wandb, "init", lambda **options: fake)
    run_with("wandb", tmp_path)
    assert axes["train/*"] == "train/step"
    assert axes["eval/*"] == "eval/step"
    assert [row["train/step"] for row in rows if "train/lr" in row] == [5, 6, 7]
    assert [row["eval/step"] for row in rows if "eval/reward_mean" in row] == [0, 1, 2]
    assert all("train/step" not in row for row in rows if "eval/step" in row)


@pytest.mark.usefixtures("no_login")
def test_wandb_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []
    url = "https://api.example.org"

    def mode(**changes: str) -> str:
        settings = {"mode": "online", "api_key": None, "identity_token_file": None, "base_url": url, **changes}
        return _wandb_mode(SimpleNamespace(**settings), told.append)

    assert mode() == "offline"
    assert len(told) == 1
    assert mode(mode="disabled") == "disabled"
    assert mode(api_key="k") == "online"
    (tmp_path / "netrc").write_text("machine api.example.org login user password k\n")
    assert mode() == "online"
    (tmp_path / "netrc").write_text("machine elsewhere.org login user password k\n")
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(ValueError, match=r"WANDB_MODE = 'online'.*no API key.*WANDB_MODE=offline"):
        mode()
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert mode() == "online"
    assert len(told) == 1


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_named_with_its_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, name, None)
    run = RunConfig(dir=str(tmp_path), trackers=[name])
    with pytest.raises(ValueError, match=rf"run\.trackers.*{name}.*pip install limes\[{name}\]"):
        open_trackers(run, RunFolder.create(run, "x"), {}, lambda text: None)


def test_what_was_opened_is_closed_when_a_later_tracker_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from limes.run import trackers

    closed: list[bool] = []
    opened = SimpleNamespace(name="tensorboard", close=lambda: closed.append(True))
    monkeypatch.setattr(trackers, "TensorBoardSink", lambda folder: opened)
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = RunConfig(dir=str(tmp_path), trackers=["tensorboard", "wandb"])
    with pytest.raises(ValueError, match="wandb"):
        open_trackers(run, RunFolder.create(run, "x"), {}, lambda text: None)
    assert closed == [True]
