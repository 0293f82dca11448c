"""What the machine itself can do, read in the same run as what is compared."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def matmul_gflops(size: int = 1024, repeats: int = 6) -> float:
    """Best float32 matrix-product speed of a few tries, in GFLOP/s."""

    def best() -> float:
        a, b = torch.randn(size, size), torch.randn(size, size)
        return min(timed(lambda: a @ b) for _ in range(repeats))

    return 2 * size**3 / on_own_thread(best) / 1e9


def on_own_thread(action: Callable[[], T]) -> T:
    """Run on a thread that ends with it: OpenMP workers of another thread would slow down who computes next."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(action).result()


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
