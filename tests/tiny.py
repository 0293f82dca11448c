"""Tiny random models and a small character tokenizer, built without any download."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
SPECIALS = ["<pad>", "<s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable character; `<|end|>` ends a turn."""
    vocab = {token: i for i, token in enumerate(SPECIALS + CHARACTERS)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|end|>",
        additional_special_tokens=SPECIALS[3:],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_model(
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tied: bool = True,
    num_layers: int = 2,
    hidden_size: int = 32,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    max_context_len: int = 256,
) -> PreTrainedModel:
    """A random decoder with the tiny tokenizer's vocabulary; weights are large enough for peaked distributions."""
    config = CONFIGS[family](
        vocab_size=len(SPECIALS) + len(CHARACTERS),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=max_context_len,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(exact_rms_norm, module)
    return model


def exact_rms_norm(module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """The norm in the type of its input; transformers' own rounds to float32 inside."""
    scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    return module.weight * hidden * scale


def save_tiny(folder: Path, family: str = "llama", **options) -> Path:
    """Write a tiny model and its tokenizer as a plain model folder."""
    model = tiny_model(family, **options)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
