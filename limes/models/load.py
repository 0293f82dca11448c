"""Loading the policy: device, type, weights and tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from limes.config.model import ModelConfig
from limes.models.policy import Policy, make_policy
from limes.models.self_check import check_served, own_outputs
from limes.models.source import resolve_model
from limes.models.tokenizer import load_tokenizer

Notice = Callable[[str], None]

SERVED = "dense decoders such as Llama, Qwen2, Qwen3 and SmolLM work"


def load_policy(config: ModelConfig, *, notice: Notice = lambda text: None) -> Policy:
    """Load the model of `config` with its tokenizer.

    Raises:
        ValueError: the model cannot be found or is of a kind that packed attention does not serve.
    """
    folder = resolve_model(config.path, notice=notice)
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    settings = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    refuse_unsupported(settings, config.path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=config.trust_remote_code)
    tokenizer = load_tokenizer(folder, config.chat_template)
    return make_checked_policy(own_memory(model.to(device)), tokenizer, folder, config.path)


def own_memory(model: PreTrainedModel) -> PreTrainedModel:
    """Copy parameters that are a file in memory, in place.

    There they start wherever the file has them, and the last bits of a CPU's products depend on that. Copies are
    aligned, as in engines of other processes.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.untyped_storage().resizable():
                parameter.data = parameter.data.clone()
    return model


def make_checked_policy(model: PreTrainedModel, tokenizer: Any, folder: Path, path: str) -> Policy:
    """Make a policy, and make sure that it says what the model said by itself.

    Raises:
        ValueError: it does not.
    """
    try:
        own = own_outputs(model.eval())
        policy = make_policy(model, tokenizer, folder=folder)
        check_served(policy, own)
    except Exception as error:
        raise ValueError(f"model.path = {path}: {failed_check(model, error)}") from error
    return policy


def failed_check(model: PreTrainedModel, error: Exception) -> str:
    """What to say of a model that failed its check."""
    return f"{model.config.model_type} failed its check at loading: {error or repr(error)}; {SERVED}"


def pick_device(name: str) -> torch.device:
    """`auto` is a GPU when there is one.

    Raises:
        ValueError: a GPU is asked for and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("model.device = cuda, but torch sees no GPU; use model.device = auto or cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is float32 on a CPU, where bfloat16 has no fast instructions, and bfloat16 on a GPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def refuse_unsupported(settings: Any, path: str) -> None:
    """Refuse, by name, what packed attention or the chunked LM head does not serve.

    Raises:
        ValueError: names the model's property.
    """
    text = settings.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    faults = {
        f"layers of kind {sorted(kinds)}": bool(kinds),
        "attention dropout": bool(getattr(text, "attention_dropout", 0.0)),
        "capped attention scores (attn_logit_softcapping)": bool(getattr(text, "attn_logit_softcapping", None)),
        "capped logits (final_logit_softcapping)": bool(getattr(text, "final_logit_softcapping", None)),
        "scaled logits (logits_scaling)": getattr(text, "logits_scaling", 1.0) not in (None, 1.0),
        "scaled logits (logit_scale)": getattr(text, "logit_scale", 1.0) not in (None, 1.0),
        "experts": bool(getattr(text, "num_local_experts", 0) or getattr(text, "num_experts", 0)),
        "encoder-decoder layers": bool(getattr(settings, "is_encoder_decoder", False)),
    }
    for what, present in faults.items():
        if present:
            raise ValueError(
                f"model.path = {path}: {settings.model_type} has {what}, which limes does not serve; {SERVED}"
            )
