"""Rules of the settings under `cluster`."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from limes.config.root import Config

LOCAL_ONLY_ONE = MappingProxyType(
    {
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": 1,
        "critic_num_nodes": 1,
        "critic_num_gpus_per_node": 1,
        "rollout_num_gpus": 1,
    }
)
"""What one process has."""


def _local_is_one_device(config: Config) -> Iterator[str]:
    cluster = config.cluster
    if cluster.kind != "local":
        return
    for name, most in LOCAL_ONLY_ONE.items():
        value = getattr(cluster, name)
        if value is not None and value != most:
            yield (
                f"cluster.{name} = {value} needs several processes, and cluster.kind = local is one; "
                "set cluster.kind to ray"
            )
    for name in ("colocate", "colocate_critic"):
        if not getattr(cluster, name):
            yield (
                f"cluster.{name} = false needs devices of their own for the roles, and cluster.kind = local has one; "
                "set cluster.kind to ray"
            )
    if "weight" in cluster.offload_rollout_level:
        yield (
            "cluster.offload_rollout_level = weight has no effect with cluster.kind = local, where the engine uses the "
            "trainer's tensors; leave weight out"
        )


def _engine_size(config: Config) -> Iterator[str]:
    cluster = config.cluster
    size, num = cluster.rollout_num_gpus_per_engine, cluster.rollout_num_gpus
    if config.engine.kind == "embedded" and size != 1:
        yield f"cluster.rollout_num_gpus_per_engine = {size}: the embedded engine runs on one device; set it to 1"
    elif num is not None and num % size:
        yield (
            f"cluster.rollout_num_gpus_per_engine = {size} does not divide cluster.rollout_num_gpus = {num}; "
            f"use {num - num % size or size} or {num - num % size + size} devices"
        )


def _debug_layouts(config: Config) -> Iterator[str]:
    cluster = config.cluster
    if cluster.debug_train_only and cluster.debug_rollout_only:
        yield "cluster.debug_train_only and cluster.debug_rollout_only are both true; choose one"
    if cluster.debug_train_only != (cluster.load_debug_rollout_data is not None):
        yield (
            f"cluster.debug_train_only = {str(cluster.debug_train_only).lower()} and "
            f"cluster.load_debug_rollout_data = {cluster.load_debug_rollout_data}: training on saved rollouts needs "
            "both; set or leave out both"
        )
    if cluster.debug_train_only and not config.rollout.num_rollout:
        yield (
            f"rollout.num_rollout = {config.rollout.num_rollout}: cluster.debug_train_only needs the number of saved "
            "rollouts to train on, 1 or more"
        )
    if cluster.debug_train_only and config.eval.interval is not None:
        yield (
            f"eval.interval = {config.eval.interval} needs an engine, and cluster.debug_train_only = true has none; "
            "leave eval.interval out"
        )


def _offloaded_weights_have_no_base(config: Config) -> Iterator[str]:
    if "weight" in config.cluster.offload_rollout_level and config.weights.transport == "delta":
        yield (
            "cluster.offload_rollout_level = weight lets go of the weights that weights.transport = delta changes; "
            "leave weight out, or use another transport"
        )


CLUSTER = (_local_is_one_device, _engine_size, _debug_layouts, _offloaded_weights_have_no_base)
