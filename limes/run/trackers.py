"""Optional metric sinks: TensorBoard, wandb, trackio.

Their packages are imported only when asked for. Each sink is opened once, at the start, where a wrong setting is still
an error for the user; `MetricLog` looks after failures later on.
"""

from __future__ import annotations

import contextvars
import importlib
import io
import netrc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from limes.config.run import RunConfig
from limes.run.folder import RunFolder
from limes.run.metric_log import Sink
from limes.run.metrics import FAMILIES, check_name

Notice = Callable[[str], None]


def open_trackers(run: RunConfig, folder: RunFolder, settings: Mapping[str, Any], notice: Notice) -> list[Sink]:
    """Open the sinks of `run.trackers`. `settings` is the whole resolved configuration as plain nested values.

    Raises:
        ValueError: a package is missing or a tracker cannot be opened; those opened before are closed.
    """
    openers: dict[str, Callable[[], Sink]] = {
        "tensorboard": lambda: TensorBoardSink(folder.path / "tensorboard"),
        "wandb": lambda: WandbSink(run.project, folder, settings, notice),
        "trackio": lambda: TrackioSink(run.project, folder.name, settings, notice),
    }
    sinks: list[Sink] = []
    try:
        for name in dict.fromkeys(run.trackers):
            sinks.append(openers[name]())
    except BaseException:
        for sink in sinks:
            sink.close()
        raise
    return sinks


class TensorBoardSink:
    """Event files in `<run folder>/tensorboard`."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        """Start an event file."""
        _need("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), flush_secs=10)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add one scalar a metric."""
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Write what is held back."""
        self._writer.close()


class WandbSink:
    """A Weights & Biases run, in `<run folder>/wandb` while offline. Never asks for a login.

    `WANDB_MODE` decides the mode where it is set; otherwise the run is online when an API key is known and offline
    when none is. Every family has its own step axis (`train/step`, ...), because wandb drops what goes backwards on a
    common one.
    """

    name = "wandb"

    def __init__(self, project: str, folder: RunFolder, settings: Mapping[str, Any], notice: Notice) -> None:
        """Start the run.

        Raises:
            ValueError: the package is missing, `WANDB_MODE=online` without a key, or wandb refused to start.
        """
        wandb = _need("wandb")
        mode = _wandb_mode(wandb.setup().settings, notice)
        options = wandb.Settings(console="off", silent=True)
        try:
            self._run = wandb.init(
                project=project,
                name=folder.name,
                dir=str(folder.path),
                config=dict(settings),
                mode=mode,
                settings=options,
            )
        except (wandb.Error, OSError) as error:
            raise ValueError(
                f"run.trackers: wandb did not start ({error}); set WANDB_MODE=offline or leave it out"
            ) from error
        for family in FAMILIES:
            self._run.define_metric(f"{family}/step", hidden=True)
            self._run.define_metric(f"{family}/*", step_metric=f"{family}/step")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add one row; each family brings its own step."""
        steps = {f"{check_name(key)}/step": step for key in metrics}
        self._run.log({**metrics, **steps})

    def close(self) -> None:
        """Finish the run and its helper process."""
        self._run.finish()


class TrackioSink:
    """A trackio run in its local store (`TRACKIO_DIR`, by default in the Hugging Face cache)."""

    name = "trackio"

    def __init__(self, project: str, run_name: str, settings: Mapping[str, Any], notice: Notice) -> None:
        """Start the run.

        Raises:
            ValueError: the package is missing or trackio refused to start.
        """
        trackio = _need("trackio")
        # trackio keeps its current run in context variables; in a context of its own no exit hook finds it again
        context = contextvars.copy_context()
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        try:
            with _no_banner():
                self._run = context.run(trackio.init, project=project, name=run_name, config=dict(settings), **quiet)
        except (ValueError, OSError, RuntimeError) as error:
            raise ValueError(
                f"run.trackers: trackio did not start ({error}); leave it out or mend the cause"
            ) from error
        notice(f'trackio: look at the run with `trackio show --project "{project}"`')

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add one row."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Write what is held back."""
        with _no_banner():
            self._run.finish()


def _need(package: str) -> Any:
    """Import an optional package."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(
            f"run.trackers names {package!r}, which is not usable here ({error}); pip install limes[{package}]"
        ) from error


@contextmanager
def _no_banner() -> Iterator[None]:
    """Drop what a library prints for people."""
    with redirect_stdout(io.StringIO()):
        yield


def _wandb_mode(settings: Any, notice: Notice) -> str:
    """The mode that starts without a question: asked for, or online with a key, or offline."""
    asked = os.environ.get("WANDB_MODE") or (settings.mode if settings.mode != "online" else None)
    known = bool(os.environ.get("WANDB_API_KEY") or settings.api_key or settings.identity_token_file)
    known = known or _in_netrc(urlsplit(settings.base_url).hostname)
    if asked == "online" and not known:
        raise ValueError(
            "WANDB_MODE = 'online', but there is no API key; set WANDB_API_KEY, run `wandb login`, "
            "or set WANDB_MODE=offline"
        )
    if asked:
        return asked
    if not known:
        notice(
            "wandb: no API key and no WANDB_MODE, so the run is kept offline in the run folder; `wandb sync` uploads it"
        )
    return "online" if known else "offline"


def _in_netrc(host: str | None) -> bool:
    """Whether the user's netrc file holds a login for the server, under its own or wandb's usual name."""
    hosts = {host} if os.environ.get("WANDB_BASE_URL") else {host, "api.wandb.ai"}
    try:
        logins = netrc.netrc(os.environ.get("NETRC") or None)
    except (OSError, netrc.NetrcParseError):
        return False
    return any(name in logins.hosts for name in hosts)
