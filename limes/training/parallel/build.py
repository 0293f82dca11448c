"""What differs between a model in one process and one on many ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from limes.config.model import ModelConfig
from limes.config.trainer import TrainerConfig
from limes.models.load import load_policy
from limes.models.policy import Policy
from limes.models.value_head import ValueModel, load_value_model
from limes.training.optimizer import PolicyOptimizer
from limes.training.parallel.models import (
    ShardedPolicy,
    ShardedValueModel,
    load_sharded_policy,
    load_sharded_value_model,
)
from limes.training.parallel.optimizer import ShardedOptimizer
from limes.training.parallel.sharding import ShardedModel, whole_tensors
from limes.training.ranks import Ranks
from limes.weights.names import Specs, TensorSpec
from limes.weights.source import ModuleSource, WeightSource


def load_policy_on(ranks: Ranks, config: ModelConfig, *, notice: Callable[[str], None] = lambda text: None) -> Policy:
    """The policy of `config`, spread over ranks that all make this call; a single rank has all of it.

    Raises:
        ValueError: it cannot be had; says on which rank, and why.
    """
    return load_policy(config, notice=notice) if ranks.is_alone else load_sharded_policy(config, ranks, notice=notice)


def load_value_model_on(
    ranks: Ranks, config: ModelConfig, path: str, *, notice: Callable[[str], None] = lambda text: None
) -> ValueModel:
    """As `load_policy_on`, for the critic's network at `path`."""
    if ranks.is_alone:
        return load_value_model(config, path, notice=notice)
    return load_sharded_value_model(config, path, ranks, notice=notice)


def build_optimizer(model: Policy | ValueModel, config: TrainerConfig) -> PolicyOptimizer:
    """The optimizer of what trains."""
    if isinstance(model, ShardedPolicy | ShardedValueModel):
        return ShardedOptimizer(model.sharded, config)
    named = model.model.named_parameters() if isinstance(model, Policy) else model.named_parameters()
    return PolicyOptimizer(named, config)


def weight_source(policy: Policy, *, bucket_bytes: int = 1 << 27) -> WeightSource:
    """The weights of a policy, in the type that it computes in.

    Args:
        bucket_bytes: gathered from the ranks at a time.
    """
    if isinstance(policy, ShardedPolicy):
        return ShardedSource(policy.sharded, bucket_bytes)
    return ModuleSource(policy.model)


class ShardedSource:
    """A `limes.weights.WeightSource` on each rank; all ranks go through `tensors` together."""

    def __init__(self, model: ShardedModel, bucket_bytes: int) -> None:
        self._model, self._bucket_bytes = model, bucket_bytes

    @property
    def specs(self) -> Specs:
        """See `WeightSource.specs`."""
        return {piece.name: TensorSpec(piece.shape, self._model.dtype) for piece in self._model.pieces}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `WeightSource.tensors`."""
        return whole_tensors(self._model, dtype=self._model.dtype, bucket_bytes=self._bucket_bytes)
