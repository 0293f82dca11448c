"""What the machine could do: the same bytes copied in memory, or written to the same disk."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

PROBE_BYTES = 1 << 27
REPEATS = 3


def memcpy_bytes_per_s(device: torch.device, num_bytes: int = PROBE_BYTES) -> float:
    """Best speed of a few copies within a device's memory, in bytes copied a second."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)  # written once: the first touch of memory is not the copy
    seconds = []
    for _ in range(REPEATS):
        _wait_for(device)
        started = time.perf_counter()
        target.copy_(source)
        _wait_for(device)
        seconds.append(time.perf_counter() - started)
    return num_bytes / min(seconds)


def disk_write_bytes_per_s(folder: Path, num_bytes: int = PROBE_BYTES) -> float:
    """Speed of one file written into a folder until it is on the disk, in bytes a second."""
    content = memoryview(os.urandom(1 << 20))  # a disk that compresses gains nothing
    path = folder / "probe.tmp"
    started = time.perf_counter()
    try:
        with path.open("wb", buffering=0) as file:
            for _ in range(max(1, num_bytes >> 20)):
                file.write(content)
            os.fsync(file.fileno())
        return max(num_bytes, 1 << 20) / (time.perf_counter() - started)
    finally:
        path.unlink(missing_ok=True)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
