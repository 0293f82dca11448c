"""Settings that take their value from elsewhere while they are unset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from limes.config.root import Config

FOLLOWS = {
    "rollout.over_sampling_batch_size": "rollout.batch_size",
    "algorithm.eps_clip_high": "algorithm.eps_clip",
    "algorithm.aggregation_constant": "rollout.max_response_len",
    "critic.path": "model.path",
    "cluster.critic_num_nodes": "cluster.actor_num_nodes",
    "cluster.critic_num_gpus_per_node": "cluster.actor_num_gpus_per_node",
    "eval.prompt_data": "data.prompt_data",
    "eval.temperature": "rollout.temperature",
    "eval.top_p": "rollout.top_p",
    "eval.top_k": "rollout.top_k",
    "eval.max_response_len": "rollout.max_response_len",
}
"""An unset setting and the one whose value it takes."""

AT_START = {
    "data.max_prompt_len": "the context less rollout.max_response_len",
    "engine.max_context_len": "the model's limit",
    "engine.kv_cache_tokens": "one rollout at full length, within engine.kv_cache_gb",
    "rollout.num_rollout": "rollout.num_epoch x rollouts an epoch",
    "cluster.rollout_num_gpus": "all that train, or as many more as the actor has",
    "cluster.offload_rollout": "where engines are colocated",
    "cluster.offload_train": "on a GPU that is shared with engines of other processes",
    "weights.transport": "shared in one process, else ipc or broadcast",
    "run.name": "the recipe's name with date and time",
}
"""An unset setting and what fills it when the run starts, once model and data are known."""


def value_of(config: Config, path: str) -> Any:
    """The value of a dotted setting as it was set."""
    section, leaf = path.split(".")
    return getattr(getattr(config, section), leaf)


def effective(config: Config, path: str) -> Any:
    """The value a dotted setting has in the end: its own, or that of the setting it follows."""
    value = value_of(config, path)
    return value_of(config, FOLLOWS[path]) if value is None and path in FOLLOWS else value
