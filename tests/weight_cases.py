"""Weights, receivers, and engines in processes of their own, for the tests of hand-over."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from engine_cases import start_engine
from hypothesis import strategies as st
from tiny import tiny_model, tiny_tokenizer
from torch import Tensor

from limes.config.weights import WeightsConfig
from limes.engine.protocol import GenerateRequest, GenerateResult
from limes.models.policy import Policy, make_policy
from limes.weights import (
    EngineWeights,
    LocalPeer,
    PipePeer,
    WeightReceiver,
    WeightSender,
    build_sender,
    serve_pipe,
)
from limes.weights.names import as_bytes

MOVING = ["ipc", "broadcast", "disk", "delta"]
CPU = torch.device("cpu")
TIMEOUT_S = 60.0
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def tensor_of(content: bytes, dtype: torch.dtype) -> Tensor:
    """Any bits as a tensor; what does not fill an element is left out. Booleans are 0 or 1."""
    content = content[: len(content) // dtype.itemsize * dtype.itemsize]
    if dtype == torch.bool:
        content = bytes(byte & 1 for byte in content)
    return torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)


def bits(tensor: Tensor) -> bytes:
    """What a tensor is made of."""
    return as_bytes(tensor).cpu().numpy().tobytes()


def same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Both hold the same names with the same bits."""
    return a.keys() == b.keys() and all(bits(a[name]) == bits(b[name]) for name in a)


@st.composite
def weight_sets(draw: st.DrawFn, dtypes: list[torch.dtype] = DTYPES) -> dict[str, Tensor]:
    """A few tensors of any types, bits and shapes, empty ones and scalars among them."""
    found = {}
    for number in range(draw(st.integers(1, 6))):
        dtype = draw(st.sampled_from(dtypes))
        tensor = tensor_of(draw(st.binary(max_size=200)), dtype)
        if draw(st.booleans()) and tensor.numel() % 2 == 0:
            tensor = tensor.reshape(2, -1)
        elif tensor.numel() == 1:
            tensor = tensor.reshape(())
        found[f"w{number}"] = tensor
    return found


def noise_like(weights: Mapping[str, Tensor], seed: int = 7) -> dict[str, Tensor]:
    """Other tensors of the same names, shapes and types."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in weights.items():
        noise = torch.randint(0, 256, (as_bytes(tensor).numel(),), dtype=torch.uint8, generator=generator)
        found[name] = tensor_of(noise.numpy().tobytes(), tensor.dtype).reshape(tensor.shape)
    return found


def sender_of(transport: str, folder: Path, **settings: Any) -> WeightSender:
    """A sender on this machine with small buckets."""
    values = {"bucket_bytes": 1000, "timeout_s": TIMEOUT_S} | settings
    config = WeightsConfig(transport=transport, **values)  # type: ignore[arg-type]
    sender = build_sender(config, device=CPU, folder=folder, host="127.0.0.1")
    sender._is_measured = True  # speed of the machine is nothing to test
    return sender


@contextmanager
def peer_of(receiver: WeightReceiver, transport: str, name: str = "engine") -> Iterator[LocalPeer | PipePeer]:
    """The receiver in this process; for broadcast on a thread of its own, since both sides wait for each other."""
    if transport != "broadcast":
        yield LocalPeer(receiver, name)
        return
    ours, theirs = multiprocessing.Pipe()
    thread = threading.Thread(target=serve_pipe, args=(theirs, receiver.handle))
    thread.start()
    peer = PipePeer(ours, name)
    try:
        yield peer
    finally:
        peer.close()
        thread.join()


@dataclass(frozen=True)
class Answer:
    """Ask an engine process for an answer."""

    request: GenerateRequest


@dataclass(frozen=True)
class ProcessFacts:
    """Ask an engine process for the places of its tied weights."""


def trained_policy(seed: int, tied: bool, dtype: torch.dtype = torch.float32) -> Policy:
    """A tiny policy without end tokens."""
    policy = make_policy(tiny_model(seed=seed, tied=tied, dtype=dtype), tiny_tokenizer())
    policy.end_token_ids = ()
    return policy


def serve_engine(connection: Connection, seed: int, tied: bool) -> None:
    """Body of an engine process: an embedded engine on a model of its own."""
    torch.set_num_threads(1)
    policy = trained_policy(seed, tied)
    receiver = WeightReceiver(policy.model)
    engine = start_engine(policy)
    weights = EngineWeights(engine, receiver, pause_mode="retract")
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def wait(call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, loop).result()

    def handle(message: Any) -> Any:
        if isinstance(message, Answer):
            return wait(engine.generate(message.request))
        if isinstance(message, ProcessFacts):
            head, embedding = policy.model.get_output_embeddings().weight, policy.model.get_input_embeddings().weight
            return head.data_ptr() == embedding.data_ptr(), len(receiver.weights)
        return wait(weights.handle(message))

    serve_pipe(connection, handle)
    receiver.close()
    wait(engine.close())


class EngineProcess:
    """An engine in another process, and the pipe to it."""

    def __init__(self, *, seed: int = 1, tied: bool = True, name: str = "engine") -> None:
        self.process, connection = start_process(serve_engine, seed, tied)
        self.peer = PipePeer(connection, name)

    def answer(self, request: GenerateRequest) -> GenerateResult:
        """Sample an answer over there."""
        return self.peer.ask(Answer(request)).result(TIMEOUT_S)  # type: ignore[arg-type]

    def kill(self) -> None:
        """End it as the kernel would, without warning."""
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        """End it in order."""
        self.peer.close()
        self.process.join(TIMEOUT_S)
        assert self.process.exitcode is not None


def start_process(body: Any, *arguments: Any) -> tuple[BaseProcess, Connection]:
    """Start `body(connection, *arguments)` in a fresh process; returns it and our end of the pipe."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "limes.engine.embedded.engine"])
    ours, theirs = context.Pipe()
    process = context.Process(target=body, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def shared_segments() -> set[str]:
    """Names in the machine's shared memory."""
    return set(os.listdir("/dev/shm"))


def open_memory() -> list[str]:
    """Shared memory that this process holds by a file descriptor."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the descriptor of the listing itself
            continue
        if "limes-weights" in target:
            found.append(target)
    return found
