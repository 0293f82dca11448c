"""Models beside the actor that score tokens and never train."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import torch

from limes.algorithms.distill import check_same_vocabulary
from limes.config import Config
from limes.models.load import load_policy
from limes.models.policy import Policy
from limes.training.checkpoint import MODEL
from limes.training.forward import PackedForward
from limes.training.parallel.models import ShardedPolicy, copy_sharded, load_sharded_policy


def load_frozen(config: Config, setting: str, path: str, actor: Policy) -> Policy:
    """Load a model that shares device, type and vocabulary with the actor; a checkpoint folder stands for its model.

    Raises:
        ValueError: it cannot be had, or its token ids mean something else.
    """
    inner = Path(path) / MODEL
    found = str(inner) if (inner / "config.json").is_file() else path
    wanted = config.model.model_copy(update={"path": found})
    try:
        if isinstance(actor, ShardedPolicy):
            policy: Policy = load_sharded_policy(wanted, actor.sharded.ranks, trainable=False)
        else:
            policy = load_policy(wanted)
        check_same_vocabulary(actor.tokenizer.get_vocab(), policy.tokenizer.get_vocab())
    except ValueError as error:
        raise ValueError(f"{setting} = {path}: {error}") from error
    if not isinstance(actor, ShardedPolicy):
        policy.model.to(device=actor.device, dtype=actor.dtype)
    return freeze(policy)


def copy_frozen(policy: Policy) -> Policy:
    """A copy that no optimizer step reaches."""
    if isinstance(policy, ShardedPolicy):
        return copy_sharded(policy)
    return freeze(replace(policy, model=copy.deepcopy(policy.model)))


def copy_weights(own: Policy, current: Policy) -> None:
    """Overwrite the weights of a frozen copy."""
    if isinstance(own, ShardedPolicy) and isinstance(current, ShardedPolicy):
        own.copy_weights(current)
        return
    with torch.no_grad():
        for mine, new in zip(own.model.parameters(), current.model.parameters(), strict=True):
            mine.copy_(new)


def freeze(policy: Policy) -> Policy:
    """Turn gradients off, in place."""
    policy.model.requires_grad_(False)
    policy.model.eval()
    return policy


def scorer(policy: Policy, config: Config) -> PackedForward:
    """Scores tokens at the temperature they were sampled with."""
    return PackedForward(
        policy,
        temperature=config.rollout.temperature,
        head_chunk=config.trainer.head_chunk,
        share_prefixes=config.trainer.share_prefixes,
    )
