"""Values of the response tokens of packed samples."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from limes.models.value_head import ValueModel
from limes.records import Sample
from limes.training.packing import pack


class PackedValues:
    """Runs packs of samples through a critic.

    Args:
        share_prefixes: compute common beginnings once.
    """

    def __init__(self, model: ValueModel, *, share_prefixes: bool = True) -> None:
        self.model = model
        self.share_prefixes = share_prefixes

    def __call__(self, samples: Sequence[Sample]) -> Tensor:
        """One value a response token, `[T]`, samples end to end in the order given; with gradients if they are enabled.

        The value of a token is that of the text before it: what it foresees does not depend on the token.
        """
        lengths = [sample.response_length for sample in samples]
        batch = pack([s.tokens for s in samples], lengths, self.model.device, share=self.share_prefixes)
        hidden_NE = self.model.hidden(batch.token_ids, batch.positions, batch.attention)
        values_P = self.model.values(hidden_NE.index_select(0, batch.head_rows))
        return values_P.index_select(0, batch.head_row_index)
