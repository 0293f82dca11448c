"""Values of the response tokens of packed samples."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from limes.models.flops import dense_tokens
from limes.models.value_head import ValueModel, ValueNetwork
from limes.records import Sample
from limes.training.forward import IDLE_TOKENS
from limes.training.packing import PackedBatch, pack
from limes.training.parallel.context import ContextCut
from limes.training.parallel.models import ranks_of
from limes.training.parallel.sharding import reshard
from limes.training.plan import plan_micro_batches


class PackedValues:
    """Runs packs of samples through a critic.

    Args:
        share_prefixes: compute common beginnings once.
    """

    def __init__(self, model: ValueModel, *, share_prefixes: bool = True) -> None:
        self.model = model
        self.share_prefixes = share_prefixes
        self.ranks = ranks_of(model)
        self._network = ValueNetwork(model.backbone, model.head) if model.network is None else model.network
        self._dense_tokens = dense_tokens(model.backbone.config) if self.ranks.layout.cp > 1 else 0.0

    def __call__(self, samples: Sequence[Sample]) -> Tensor:
        """One value a response token, `[T]`, samples end to end in the order given; with gradients if they are enabled.

        The value of a token is that of the text before it: what it foresees does not depend on the token.
        """
        lengths = [sample.response_length for sample in samples]
        return self._outputs(pack([s.tokens for s in samples], lengths, self.model.device, share=self.share_prefixes))

    def plan(self, samples: Sequence[Sample], max_tokens: int) -> list[list[int]]:
        """Micro-batches of at most `max_tokens` tokens, as many on every rank."""
        tokens = [sample.tokens for sample in samples]
        return plan_micro_batches(tokens, max_tokens, share=self.share_prefixes, ranks=self.ranks)

    def idle(self) -> Tensor:
        """Take part in a pass of the other ranks: a scalar whose gradients are zeros."""
        return self._outputs(pack([IDLE_TOKENS], [1], self.model.device)).sum() * 0.0

    def scored(self) -> None:
        """Passes without gradients are over, and the weights are about to move."""
        if not self.ranks.is_alone:
            reshard(self._network)

    def _outputs(self, batch: PackedBatch) -> Tensor:
        cut = None
        if self.ranks.layout.cp > 1:
            cut = ContextCut(batch, self.ranks.cp_group, self.model.device, dense_tokens=self._dense_tokens)
        part = batch if cut is None else cut.part
        values_P = self._network(part.token_ids, part.positions, part.attention, part.head_rows).squeeze(-1)
        if cut is not None:
            values_P = cut.gather_rows(values_P)
        return values_P.index_select(0, batch.head_row_index)
