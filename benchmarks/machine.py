"""What the machine itself can do, read in the same run as what is compared."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable

import torch


def matmul_gflops(size: int = 1024, repeats: int = 6) -> float:
    """Best float32 matrix-product speed of a few tries, in GFLOP/s."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    best = min(timed(lambda: a @ b) for _ in range(repeats))
    return 2 * size**3 / best / 1e9


def timed(action: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def describe() -> str:
    """One line on the machine."""
    return f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def spread(values: list[float], digits: int = 1) -> str:
    """Median with the least and the largest value."""
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({min(values):.{digits}f} .. {max(values):.{digits}f})"
