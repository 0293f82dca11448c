"""A sender by the settings."""

from __future__ import annotations

from pathlib import Path

import torch

from limes.config.weights import WeightsConfig
from limes.weights.broadcast import BroadcastTransport
from limes.weights.delta import DeltaTransport
from limes.weights.disk import DiskTransport
from limes.weights.ipc import IpcTransport
from limes.weights.sender import WeightSender
from limes.weights.shared import SharedTransport
from limes.weights.transport import Transport


def build_sender(config: WeightsConfig, *, device: torch.device, folder: Path, host: str | None = None) -> WeightSender:
    """The sender that `config.transport` names; it still has to connect.

    Args:
        device: of the trainer's weights.
        folder: for files, unless the settings name one.
        host: address at which engines reach this process, unless the settings name one.
    """
    root = folder if config.disk_dir is None else Path(config.disk_dir)
    timeout_s = config.timeout_s
    transport: Transport
    if config.transport in (None, "shared"):
        transport = SharedTransport()
    elif config.transport == "ipc":
        transport = IpcTransport(bucket_bytes=config.bucket_bytes, timeout_s=timeout_s)
    elif config.transport == "broadcast":
        transport = BroadcastTransport(
            bucket_bytes=config.bucket_bytes, timeout_s=timeout_s, device=device, host=config.host or host
        )
    elif config.transport == "disk":
        transport = DiskTransport(root, timeout_s=timeout_s, keep_files=config.keep_files)
    else:
        transport = DeltaTransport(root, timeout_s=timeout_s, keep_files=config.keep_files)
    return WeightSender(transport, timeout_s=timeout_s)
