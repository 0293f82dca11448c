"""How the ranks of a trainer are laid out; from the settings and the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from limes.config.trainer import TrainerConfig

SETTINGS = ("tensor_model_parallel_size", "context_parallel_size", "dp_replicate_size")
"""Under `trainer`: what the ranks are divided by; the others shard the model."""


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Sizes along each way of cutting the work; their product is the number of ranks.

    Attributes:
        dp_replicate: copies of the sharded model, each with its own samples.
        dp_shard: ranks with their own samples that share one copy of the model.
        cp: ranks that share the tokens of each micro-batch.
        tp: ranks that share the heads and columns of each layer.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def size(self) -> int:
        """All ranks."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Data-parallel ranks: how many shards a rollout is dealt into."""
        return self.dp_replicate * self.dp_shard


def lay_out(num_ranks: int, trainer: TrainerConfig) -> RankLayout:
    """The layout of a trainer of `num_ranks` ranks: what the settings do not claim shards the model.

    Raises:
        ValueError: the settings do not divide the ranks.
    """
    tp, cp, replicas = (int(getattr(trainer, name)) for name in SETTINGS)
    unit = tp * cp * replicas
    if num_ranks % unit:
        raise ValueError(
            f"trainer.tensor_model_parallel_size {tp} x trainer.context_parallel_size {cp} x "
            f"trainer.dp_replicate_size {replicas} = {unit} does not divide the {num_ranks} ranks of the "
            f"trainer; use a multiple of {unit} ranks, or make one of the three smaller"
        )
    return RankLayout(replicas, num_ranks // unit, cp, tp)
