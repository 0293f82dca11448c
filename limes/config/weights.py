"""Settings of how new weights reach the engines."""

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from limes.config.base import Section


class WeightsConfig(Section):
    """The way from the trainer's weights to the engines'."""

    transport: Literal["shared", "ipc", "broadcast", "disk", "delta"] | None = None
    """`shared`: the same tensors, in one process; `ipc`: another process on the same host, and on a GPU the same GPU;
    `broadcast`: a torch.distributed group; `disk`: files with all weights; `delta`: files with what changed.
    Default: `shared` in one process; with Ray `ipc` where trainer and engines share devices, else `broadcast`."""

    bucket_bytes: PositiveInt = 1 << 27
    """Bytes of weights gathered and sent at a time, by `ipc` and `broadcast`."""

    pause_mode: Literal["abort", "retract", "in_place"] = "retract"
    """What an update does to running answers: `abort` ends them, `retract` computes their keys anew with the new
    weights, `in_place` keeps their keys."""

    host: str | None = None
    """Address at which engines reach the trainer, for `broadcast`; default: that of the trainer's machine."""

    disk_dir: str | None = None
    """Folder of `disk` and `delta`, which every engine's host must see; default: `weights` in the run folder."""

    keep_files: bool = False
    """Keep the files of `disk` and `delta`; else each goes as soon as the engines have read it."""

    check_update_equal: bool = False
    """At the start of a run, turn the engines' weights into noise, update them, and end the run with the names of those
    that are not what they were."""

    timeout_s: PositiveFloat = 300.0
    """Seconds that an engine may take for a step of an update before the run ends."""
