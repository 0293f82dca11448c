"""Values of the response tokens of packed samples."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from limes.models.value_head import ValueModel, ValueNetwork
from limes.records import Sample
from limes.training.packed_pass import PackedPass
from limes.training.packing import PackedBatch


class PackedValues(PackedPass):
    """Runs packs of samples through a critic.

    Args:
        share_prefixes: compute common beginnings once.
    """

    def __init__(self, model: ValueModel, *, share_prefixes: bool = True) -> None:
        network = ValueNetwork(model.backbone, model.head) if model.network is None else model.network
        dtype = model.head.weight.dtype
        super().__init__(model, network, model.backbone.config, share_prefixes=share_prefixes, dtype=dtype)

    def __call__(self, samples: Sequence[Sample]) -> Tensor:
        """One value a response token, `[T]`, samples end to end in the order given; with gradients if they are enabled.

        The value of a token is that of the text before it: what it foresees does not depend on the token.
        """
        return self.token_values(self.pack(samples))

    def token_values(self, batch: PackedBatch) -> Tensor:
        """See `__call__`."""
        part, cut = self.own_part(batch)
        values_P = self.network(part.token_ids, part.positions, part.attention, part.head_rows).squeeze(-1)
        if cut is not None:
            values_P = cut.gather_rows(values_P)
        return values_P.index_select(0, batch.head_row_index)
