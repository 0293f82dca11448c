"""Policies and critics on many ranks: what they are made of, how they are loaded, and copied."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from limes.config.model import ModelConfig
from limes.models.load import make_checked_policy, pick_dtype, refuse_unsupported
from limes.models.log_probs import LogProbs
from limes.models.policy import Policy, make_policy
from limes.models.source import resolve_model
from limes.models.tokenizer import load_tokenizer
from limes.models.value_head import HEAD, ValueModel, ValueNetwork, make_value_model, read_value_model
from limes.models.vocab_parallel import vocab_parallel_log_probs
from limes.training.parallel.checkpoint import load_model_folder, save_model_folder
from limes.training.parallel.sharding import ShardedModel, shard, whole_tensors
from limes.training.parallel.tensor import plan_tensor_parallel, slice_bounds
from limes.training.ranks import Ranks


@dataclass
class ShardedPolicy(Policy):
    """A policy on many ranks.

    Attributes:
        sharded: its parts.
    """

    sharded: ShardedModel = field(kw_only=True)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.sharded.ranks.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the forward pass."""
        return self.sharded.dtype

    @property
    def vocab_size(self) -> int:
        """Rows of the LM head."""
        return self.model.config.get_text_config().vocab_size

    def copy_weights(self, other: ShardedPolicy) -> None:
        """Take over the weights of a policy that is spread alike."""
        with torch.no_grad():
            for own, new in zip(self.sharded.pieces, other.sharded.pieces, strict=True):
                own.local.copy_(new.local)


@dataclass
class ShardedValueModel(ValueModel):
    """A critic on many ranks.

    Attributes:
        sharded: its parts.
    """

    sharded: ShardedModel = field(kw_only=True)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.sharded.ranks.device

    def save(self, folder: Path) -> None:
        """See `ValueModel.save`; all ranks make this call."""
        save_model_folder(folder, self.sharded, self.backbone)
        head = {name.removeprefix("head."): x for name, x in whole_tensors(self.sharded, dtype=None) if "head." in name}
        with self.sharded.ranks.together(f"saving {folder / HEAD}"):
            if self.sharded.ranks.is_first:
                save_file({name: value.cpu() for name, value in head.items()}, folder / HEAD)

    def load(self, folder: Path) -> None:
        """See `ValueModel.load`."""
        with self.sharded.ranks.together(f"loading {folder}"):
            if not (folder / HEAD).is_file():
                raise ValueError(f"{folder} holds no critic: it lacks {HEAD}")
            load_model_folder(folder, self.sharded, self.backbone, {"head.": folder / HEAD})


def ranks_of(model: Policy | ValueModel) -> Ranks:
    """The ranks that a model is spread over."""
    return model.sharded.ranks if isinstance(model, ShardedPolicy | ShardedValueModel) else Ranks.alone()


def shard_policy(
    policy: Policy, ranks: Ranks, *, dtype: torch.dtype | None = None, trainable: bool = True, filled: bool = True
) -> ShardedPolicy:
    """Spread a policy over ranks, in place; its parameters may be on `meta` everywhere but on rank 0.

    Args:
        dtype: of the forward pass; None is that of the parameters.
        filled: hand out rank 0's parameters; else those on `meta` become memory that the caller fills.

    Raises:
        ValueError: the model's heads cannot be dealt out to so many ranks.
    """
    model = policy.model
    dtype = dtype or policy.dtype
    network = LogProbs(model)
    if plan_tensor_parallel(model, ranks.layout.tp).vocab_head:
        first_row = slice_bounds(policy.vocab_size, ranks.tp_rank, ranks.layout.tp)[0]
        network.head = partial(vocab_parallel_log_probs, first_row=first_row, group=ranks.tp_group)
    sharded = shard(network, model, ranks, dtype=dtype, prefix="model.", trainable=trainable, filled=filled)
    return ShardedPolicy(
        model, policy.tokenizer, policy.end_token_ids, policy.max_context_len, policy.folder, network, sharded=sharded
    )


def shard_value_model(model: ValueModel, ranks: Ranks, *, dtype: torch.dtype | None = None) -> ShardedValueModel:
    """Spread a critic over ranks, in place; see `shard_policy`."""
    network = ValueNetwork(model.backbone, model.head)
    dtype = dtype or model.backbone.dtype
    sharded = shard(network, model.backbone, ranks, dtype=dtype, apart=[model.head])
    return ShardedValueModel(model.backbone, model.head, network, sharded=sharded)


def load_sharded_policy(
    config: ModelConfig, ranks: Ranks, *, notice: Callable[[str], None] = lambda text: None, trainable: bool = True
) -> ShardedPolicy:
    """Load the model of `config` on rank 0, check it there, and spread it; all ranks make this call.

    Raises:
        ValueError: the model cannot be had on some rank, which is named, or cannot be dealt out to so many.
    """
    with ranks.together(f"loading model.path = {config.path}"):
        folder = resolve_model(config.path, notice=notice)
        dtype = pick_dtype(config.dtype, ranks.device)
        settings = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
        refuse_unsupported(settings, config.path)
        tokenizer = load_tokenizer(folder, config.chat_template)
        if ranks.is_first:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, trust_remote_code=config.trust_remote_code
            )
            policy = make_checked_policy(model, tokenizer, folder, config.path)
        else:
            policy = make_policy(on_meta(AutoModelForCausalLM, settings, dtype, config), tokenizer, folder=folder)
        plan_tensor_parallel(policy.model, ranks.layout.tp)
        policy.model.requires_grad_(trainable)
    return shard_policy(policy, ranks, dtype=dtype, trainable=trainable)


def load_sharded_value_model(
    config: ModelConfig, path: str, ranks: Ranks, *, notice: Callable[[str], None] = lambda text: None
) -> ShardedValueModel:
    """As `load_sharded_policy`, for the critic at `path`; see `value_head.load_value_model`."""
    with ranks.together(f"loading critic.path = {path}"):
        folder = resolve_model(path, notice=notice)
        dtype = pick_dtype(config.dtype, ranks.device)
        settings = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
        refuse_unsupported(settings, path)
        if ranks.is_first:
            model = read_value_model(folder, dtype, trust_remote_code=config.trust_remote_code)
        else:
            model = make_value_model(on_meta(AutoModel, settings, dtype, config))
        plan_tensor_parallel(model.backbone, ranks.layout.tp)
    return shard_value_model(model, ranks, dtype=dtype)


def copy_sharded(policy: ShardedPolicy) -> ShardedPolicy:
    """A frozen copy, spread alike; all ranks make this call."""
    ranks = policy.sharded.ranks
    config = ModelConfig(trust_remote_code=True)  # of code that runs already
    model = on_meta(AutoModelForCausalLM, copy.deepcopy(policy.model.config), policy.dtype, config)
    for name, buffer in policy.model.named_buffers():
        path, _, own = name.rpartition(".")
        model.get_submodule(path)._buffers[own] = buffer
    model.requires_grad_(False)
    plain = make_policy(model, policy.tokenizer, folder=policy.folder)
    copied = shard_policy(plain, ranks, dtype=policy.dtype, trainable=False, filled=False)
    copied.copy_weights(policy)
    return copied


def on_meta(kind: Any, settings: Any, dtype: torch.dtype, config: ModelConfig) -> PreTrainedModel:
    """A model without memory for its parameters."""
    with torch.device("meta"):
        return kind.from_config(settings, dtype=dtype, trust_remote_code=config.trust_remote_code)
