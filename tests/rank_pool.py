"""Processes that train together, started once for many tests."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from limes.config.parallel import RankLayout

TIMEOUT_S = 180


class RankPool:
    """Processes that run one function together, as the ranks of a layout."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, layout: RankLayout, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(ranks, *args)` gives on each rank; an error of one of them is raised here."""
        port = free_port()
        for rank, pipe in zip(range(layout.size), self._pipes, strict=False):
            pipe.send((rank, layout, port, function, args))
        answers = []
        for rank, pipe in zip(range(layout.size), self._pipes, strict=False):
            assert pipe.poll(TIMEOUT_S), f"rank {rank} of {layout} hangs"
            answers.append(pipe.recv())
        for rank, (error, _) in enumerate(answers):
            assert error is None, f"rank {rank} of {layout}:\n{error}"
        return [value for _, value in answers]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
            process.join()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _serve(pipe: Connection) -> None:
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    import torch

    from limes.training.ranks import Ranks

    torch.set_num_threads(1)
    while True:
        rank, layout, port, function, args = pipe.recv()
        try:
            ranks = Ranks.join(rank, layout, address=f"127.0.0.1:{port}", device=torch.device("cpu"), timeout_s=100)
            try:
                pipe.send((None, function(ranks, *args)))
            finally:
                ranks.leave()
        except Exception:  # noqa: BLE001 - the parent raises it
            pipe.send((traceback.format_exc(), None))
