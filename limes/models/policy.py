"""The policy: one causal language model whose tensors trainer and engine share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from limes.models.attention import AttentionPlan, use_limes_attention
from limes.models.cpu_linear import use_cpu_linears
from limes.models.log_probs import LogProbs


class TextModel(Protocol):
    """What prompts and answers have to know of a model; a policy is one."""

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer, chat template included."""
        ...

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        ...

    @property
    def max_context_len(self) -> int:
        """Longest sequence in tokens."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...


@dataclass
class Policy:
    """A model ready for packed forward passes, with what belongs to it.

    Attributes:
        model: a transformers causal LM that attends through plans.
        tokenizer: its tokenizer, chat template included.
        end_token_ids: ids that end an answer.
        max_context_len: longest sequence in tokens.
        folder: where its files came from.
        network: the model's one forward pass in training; a model on many ranks has one with hooks.
    """

    model: PreTrainedModel
    tokenizer: Any
    end_token_ids: tuple[int, ...]
    max_context_len: int
    folder: Path | None = None
    network: LogProbs | None = None

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return self.head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the parameters."""
        return self.head_weight.dtype

    @property
    def head_weight(self) -> Tensor:
        """The LM head, `[V, E]`."""
        return self.model.get_output_embeddings().weight

    @property
    def vocab_size(self) -> int:
        """Rows of the LM head: token ids are below this."""
        return self.head_weight.shape[0]

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return num_layers(self.model)

    @property
    def kv_shape(self) -> tuple[int, int]:
        """Key heads and head size."""
        return kv_shape(self.model)

    def hidden(self, token_ids_N: Tensor, positions_N: Tensor, plan: AttentionPlan) -> Tensor:
        """Final hidden states `[N, E]` of packed tokens."""
        output = self.model.base_model(
            input_ids=token_ids_N[None], position_ids=positions_N[None], use_cache=False, attention_plan=plan
        )
        return output.last_hidden_state[0]


def num_layers(model: PreTrainedModel) -> int:
    """Decoder layers."""
    return model.config.get_text_config().num_hidden_layers


def kv_shape(model: PreTrainedModel) -> tuple[int, int]:
    """Key heads and head size."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return getattr(config, "num_key_value_heads", None) or heads, head_dim


def make_policy(model: PreTrainedModel, tokenizer: Any, *, folder: Path | None = None) -> Policy:
    """Turn a loaded model into a policy, in place."""
    use_limes_attention(model)
    use_cpu_linears(model)
    model.eval()
    settings = model.config.get_text_config()
    context = min([settings.max_position_embeddings, *sliding_windows(settings), *longrope_limits(settings)])
    return Policy(model, tokenizer, find_end_tokens(model, tokenizer, folder), context, folder)


def sliding_windows(settings: Any) -> list[int]:
    """Window lengths of the layers that see only the last tokens."""
    window = getattr(settings, "sliding_window", None)
    kinds = getattr(settings, "layer_types", None)
    sliding = "sliding_attention" in kinds if kinds else bool(window) and getattr(settings, "use_sliding_window", True)
    return [int(window)] if window and sliding else []


def longrope_limits(settings: Any) -> list[int]:
    """Lengths up to which rotary positions do not depend on the longest sequence that is computed together."""
    parameters = getattr(settings, "rope_parameters", None) or {}
    kinds = [kind for kind in (parameters, *parameters.values()) if isinstance(kind, dict)]
    return [int(kind["original_max_position_embeddings"]) for kind in kinds if kind.get("rope_type") == "longrope"]


def find_end_tokens(model: PreTrainedModel, tokenizer: Any, folder: Path | None) -> tuple[int, ...]:
    """End ids of the tokenizer, the model's config and, of its generation config, the end ids alone.

    Ids that the LM head has no row for can never be drawn and are left out.
    """
    generation: Any = model.generation_config
    if folder is not None and (folder / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(folder)
    found: set[int] = set()
    for value in (tokenizer.eos_token_id, model.config.eos_token_id, getattr(generation, "eos_token_id", None)):
        found.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    vocab_size = model.get_output_embeddings().weight.shape[0]
    return tuple(sorted(token for token in found if 0 <= token < vocab_size))


def enable_checkpointing(model: PreTrainedModel) -> None:
    """Recompute each layer's activations in the backward pass.

    The model stays in evaluation mode, in which nothing drops out; transformers' own way needs training mode.

    Raises:
        ValueError: the model does not say which of its modules are layers.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"trainer.gradient_checkpointing = true: {model.config.model_type} has no layers that can be recomputed; "
            "set it to false"
        )
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
