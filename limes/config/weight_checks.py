"""Rules of the settings under `weights`."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from limes.config.root import Config

READ_BY = MappingProxyType(
    {
        "bucket_bytes": ("ipc", "broadcast"),
        "pause_mode": ("ipc", "broadcast", "disk", "delta"),
        "host": ("broadcast",),
        "disk_dir": ("disk", "delta"),
        "keep_files": ("disk", "delta"),
        "check_update_equal": ("ipc", "broadcast", "disk", "delta"),
        "timeout_s": ("ipc", "broadcast", "disk", "delta"),
    }
)
"""Which transports look at a setting."""


def _shared_in_one_process(config: Config) -> Iterator[str]:
    """Roles of one process use the same tensors."""
    transport = config.weight_transport()
    if config.cluster.kind == "local" and transport != "shared":
        yield (
            f"weights.transport = {transport} needs engines in processes of their own, and with cluster.kind = local "
            "they use the trainer's tensors; set weights.transport to shared"
        )
    if config.cluster.kind == "ray" and transport == "shared":
        yield (
            "weights.transport = shared needs trainer and engine in one process, and cluster.kind = ray has one for "
            "each; use ipc, broadcast, disk or delta"
        )


def _settings_of_the_transport(config: Config) -> Iterator[str]:
    """A setting that the transport does not read is a mistake."""
    transport = config.weight_transport()
    for name, field in type(config.weights).model_fields.items():
        value = getattr(config.weights, name)
        if name in READ_BY and value != field.default and transport not in READ_BY[name]:
            yield (
                f"weights.{name} = {value} has no effect with weights.transport = {transport}; "
                f"it is for {', '.join(READ_BY[name])}; leave it out"
            )


def _check_needs_the_same_weights(config: Config) -> Iterator[str]:
    if config.weights.check_update_equal and config.checkpoint.load is not None:
        yield (
            "weights.check_update_equal = true compares with the weights of model.path, and checkpoint.load replaces "
            "them; leave one out"
        )


WEIGHTS = (_check_needs_the_same_weights, _shared_in_one_process, _settings_of_the_transport)
