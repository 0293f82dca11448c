"""Checkpoints of a model on many ranks: a plain model folder, and the optimizer in one file a rank.

Parts say where they lie in the whole (`limes.training.parallel.boxes`), so that any number of ranks, one included, goes
on from them, and many go on from what one has written.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from limes.training.folders import optimizer_file, optimizer_files
from limes.training.parallel.boxes import PartsReader, save_parts
from limes.training.parallel.optimizer import ShardedOptimizer
from limes.training.parallel.sharding import ShardedModel, whole_tensors

MAX_FILE_BYTES = 4 << 30


def save_optimizer_parts(folder: Path, optimizer: ShardedOptimizer) -> None:
    """Write this rank's file; those of all ranks together hold every number once."""
    ranks = optimizer.model.ranks
    if ranks.replica_rank != 0:
        return
    num = ranks.size // ranks.layout.dp_replicate
    save_parts(folder / optimizer_file(ranks.rank, num), optimizer.parts())


def load_optimizer_parts(folder: Path, optimizer: ShardedOptimizer) -> None:
    """Restore this rank's part of what any number of ranks wrote.

    Raises:
        ValueError: it is of another model.
    """
    ranks = optimizer.model.ranks
    pieces = {piece.name: piece for piece in optimizer.model.pieces}
    by_name: dict[str, dict[str, Tensor]] = {name: {} for name in pieces}
    with PartsReader(optimizer_files(folder)) as reader:
        for key in sorted(reader.shapes):
            name, _, entry = key.rpartition("/")
            piece = pieces.get(name)
            if piece is None or (entry != "step" and reader.shapes[key] != piece.shape):
                raise ValueError(f"{folder}: the saved optimizer is of another model: {name} is not in this one")
            box = piece.box(ranks)
            if box.num:
                by_name[name][entry] = reader.read(key, None if entry == "step" else box)
    optimizer.load_state_dict(by_name)


def save_model_folder(folder: Path, model: ShardedModel, network: PreTrainedModel, tokenizer: Any = None) -> None:
    """Write a plain model folder of transformers, from whole tensors one after the other; all ranks make this call.

    Raises:
        ValueError: rank 0 cannot write.
    """
    own = {id(parameter): name for name, parameter in network.named_parameters()}
    names = {piece.name: own[id(piece.parameter)] for piece in model.pieces if id(piece.parameter) in own}
    tensors = ((names[name], whole) for name, whole in whole_tensors(model, dtype=model.dtype) if name in names)
    with model.ranks.together(f"saving {folder}"):
        try:
            if model.ranks.is_first:
                _write(folder, tensors, network, model.dtype, tokenizer)
        finally:
            for _ in tensors:  # where writing has failed, the other ranks are still gathering
                pass


def _write(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], network: PreTrainedModel, dtype: torch.dtype, tokenizer: Any
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    settings = copy.deepcopy(network.config)
    settings.architectures = [type(network).__name__]
    settings.dtype = dtype
    settings.save_pretrained(folder)
    if network.can_generate() and network.generation_config is not None:
        network.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    write_weights(folder, tensors)


def write_weights(folder: Path, tensors: Iterable[tuple[str, Tensor]], max_bytes: int = MAX_FILE_BYTES) -> None:
    """Write tensors into safetensors files of a bounded size, with an index if there are several."""
    places: dict[str, int] = {}
    batch: dict[str, Tensor] = {}
    num_bytes = num_files = total = 0

    def flush() -> None:
        nonlocal num_bytes, num_files
        save_file(batch, folder / f"part-{num_files}.safetensors", metadata={"format": "pt"})
        num_files, num_bytes = num_files + 1, 0
        batch.clear()

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if batch and num_bytes + size > max_bytes:
            flush()
        batch[name] = tensor.detach().cpu().contiguous().clone()
        places[name] = num_files
        num_bytes, total = num_bytes + size, total + size
    flush()
    _name_files(folder, places, num_files, total)


def _name_files(folder: Path, places: Mapping[str, int], num_files: int, total: int) -> None:
    """Give the files the names by which transformers finds them."""
    if num_files == 1:
        (folder / "part-0.safetensors").rename(folder / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{num_files:05d}.safetensors" for i in range(num_files)]
    for i, name in enumerate(names):
        (folder / f"part-{i}.safetensors").rename(folder / name)
    index = {"metadata": {"total_size": total}, "weight_map": {name: names[i] for name, i in places.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


@torch.no_grad()
def load_model_folder(
    folder: Path, model: ShardedModel, network: PreTrainedModel, also: Mapping[str, Path] = MappingProxyType({})
) -> None:
    """Read this rank's parts of the weights from a model folder.

    Args:
        also: files with weights that are not the transformers model's, by the prefix of their names.

    Raises:
        ValueError: the folder is of another model.
    """
    own = {id(parameter): name for name, parameter in network.named_parameters()}
    with ExitStack() as files:
        reader = files.enter_context(PartsReader(sorted(folder.glob("model*.safetensors"))))
        others = {prefix: files.enter_context(PartsReader([path])) for prefix, path in also.items()}
        for piece in model.pieces:
            source, name = reader, own.get(id(piece.parameter))
            if name is None:
                prefix = next(prefix for prefix in others if piece.name.startswith(prefix))
                source, name = others[prefix], piece.name.removeprefix(prefix)
            if source.shapes.get(name) != piece.shape:
                found = source.shapes.get(name)
                held = "missing" if found is None else list(found)
                raise ValueError(f"{folder} holds another model: {name} is {held} and not {list(piece.shape)}")
            box = piece.box(model.ranks)
            if box.num:
                piece.local.copy_(source.read(name, box))
