"""What a policy's and a critic's passes over packed samples have in common: the micro-batches of all ranks, the cut of
each over context-parallel ranks, passes for nobody, and one number a token without gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from limes.models.flops import dense_tokens
from limes.models.policy import Policy
from limes.models.value_head import ValueModel
from limes.records import Sample
from limes.training.packing import PackedBatch, pack
from limes.training.parallel.context import ContextCut
from limes.training.parallel.models import ranks_of
from limes.training.parallel.sharding import reshard
from limes.training.plan import plan_micro_batches

IDLE_TOKENS = (0, 0)
"""What a rank without samples computes, so that the others do not wait for it."""


class PackedPass(ABC):
    """Runs packs of samples through a network.

    Args:
        model: what the network belongs to.
        network: is called with packed tokens.
        settings: of the transformers model in it.
        share_prefixes: compute common beginnings once.
        dtype: of the numbers that come out.
    """

    def __init__(
        self,
        model: Policy | ValueModel,
        network: nn.Module,
        settings: PretrainedConfig,
        *,
        share_prefixes: bool,
        dtype: torch.dtype,
    ) -> None:
        self.model, self.network = model, network
        self.share_prefixes, self.dtype = share_prefixes, dtype
        self.ranks = ranks_of(model)
        self._dense_tokens = dense_tokens(settings) if self.ranks.layout.cp > 1 else 0.0

    @abstractmethod
    def token_values(self, batch: PackedBatch) -> Tensor:
        """One number a response token, `[T]`; with gradients if they are enabled."""

    def pack(self, samples: Sequence[Sample]) -> PackedBatch:
        """The packed form of some samples."""
        lengths = [sample.response_length for sample in samples]
        return pack([s.tokens for s in samples], lengths, self.model.device, share=self.share_prefixes)

    def plan(self, samples: Sequence[Sample], max_tokens: int) -> list[list[int]]:
        """Micro-batches of at most `max_tokens` tokens, as many on every rank."""
        tokens = [sample.tokens for sample in samples]
        return plan_micro_batches(tokens, max_tokens, share=self.share_prefixes, ranks=self.ranks)

    def idle(self) -> Tensor:
        """Take part in a pass of the other ranks: a scalar whose gradients are zeros."""
        return self.token_values(pack([IDLE_TOKENS], [1], self.model.device)).sum() * 0.0

    @torch.no_grad()
    def score(self, samples: Sequence[Sample], max_tokens: int) -> Tensor:
        """`token_values` of the samples, end to end, `[T]`, in passes of at most `max_tokens` tokens."""
        lengths = [sample.response_length for sample in samples]
        found: dict[int, Tensor] = {}
        for indices in self.plan(samples, max_tokens):
            if not indices:
                self.idle()
                continue
            values = self.token_values(self.pack([samples[i] for i in indices]))
            found.update(zip(indices, values.split([lengths[i] for i in indices]), strict=True))
        if not self.ranks.is_alone:
            reshard(self.network)  # the weights are about to move
        nothing = torch.empty(0, device=self.model.device, dtype=self.dtype)
        return torch.cat([nothing, *(found[i] for i in range(len(samples)))])

    def own_part(self, batch: PackedBatch) -> tuple[PackedBatch, ContextCut | None]:
        """What this rank computes of a batch, and the cut that puts results together again."""
        if self.ranks.layout.cp == 1:
            return batch, None
        cut = ContextCut(batch, self.ranks.cp_group, self.model.device, dense_tokens=self._dense_tokens)
        return cut.part, cut
