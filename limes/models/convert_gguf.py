"""From a GGUF file to a plain Hugging Face folder in float32."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import modeling_gguf_pytorch_utils as gguf_loader
from transformers.utils import logging as transformers_logging

SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id",
}
"""A tokenizer's attributes and the file's names for them."""


class _PlainReader(gguf.GGUFReader):
    """A reader over a plain array: its parser takes millions of tiny slices, which are slow on a `memmap`."""

    @property
    def data(self) -> Any:
        return self._plain_data

    @data.setter
    def data(self, mapped: Any) -> None:
        self._plain_data = mapped.view(np.ndarray)


def convert(path: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file into `folder` (safetensors, float32).

    transformers reads the weights and builds the tokenizer; the model is then rebuilt without its quantisation, which
    cannot be saved.

    Raises:
        ValueError: transformers does not know the architecture, or weights are missing.
    """
    # Whatever is drawn while a model is built must not depend on whether a conversion came before.
    with torch.random.fork_rng(devices=[]), _quick_and_quiet():
        try:
            loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
                str(path.parent), gguf_file=path.name, dtype=torch.float32, output_loading_info=True
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise ValueError(f"transformers cannot read {path.name} ({error})") from error
        faults = {kind: sorted(map(str, names)) for kind, names in report.items() if names and kind != "error_msgs"}
        if faults:
            raise ValueError(f"{path.name} does not fit its architecture: {faults}")
        _finish_tokenizer(tokenizer, path)
        _without_quantisation(loaded).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _without_quantisation(loaded: Any) -> Any:
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        clean = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    clean.load_state_dict(loaded.state_dict(), strict=True, assign=True)
    clean.tie_weights()
    return clean


def _finish_tokenizer(tokenizer: Any, path: Path) -> None:
    """Take from the file what transformers, or some versions of it, leave out.

    SmolLM's vocabulary was learned with every digit apart: without that, white space before a digit becomes other
    tokens than the model was trained on.
    """
    header = gguf.GGUFReader(str(path))
    for role, key in SPECIAL_TOKENS.items():
        if field := header.get_field(f"tokenizer.ggml.{key}"):
            setattr(tokenizer, role, tokenizer.convert_ids_to_tokens(int(field.parts[-1][0])))
    field = header.get_field("tokenizer.ggml.pre")
    if field and bytes(field.parts[-1]) == b"smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


@contextmanager
def _quick_and_quiet() -> Iterator[None]:
    """While it lasts, the file's header is parsed once instead of once a question, the table of tensor names is built
    once instead of once a module, and no progress bar or warning is shown. Only speed and output depend on it."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with ExitStack() as stack:
            for module, name, value in (
                (gguf, "GGUFReader", functools.cache(_PlainReader)),
                (gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
                (gguf_loader, "tqdm", lambda items, **_: items),
            ):
                stack.enter_context(_replaced(module, name, value))
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Stand in for a module's attribute, where it has it."""
    if not hasattr(module, name):
        yield
        return
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)
