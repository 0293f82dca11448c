"""Rules of the settings that lay out the trainer's ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from limes.config.parallel import SETTINGS, lay_out

if TYPE_CHECKING:
    from limes.config.root import Config


def _ranks_divide(config: Config) -> Iterator[str]:
    cluster, trainer = config.cluster, config.trainer
    if cluster.kind == "local":
        for name in SETTINGS:
            value = getattr(trainer, name)
            if value != 1:
                yield (
                    f"trainer.{name} = {value} needs several ranks, and cluster.kind = local has one; "
                    "set cluster.kind to ray"
                )
        return
    try:
        lay_out(cluster.actor_num_nodes * cluster.actor_num_gpus_per_node, trainer)
    except ValueError as error:
        yield str(error)


PARALLEL = (_ranks_divide,)
