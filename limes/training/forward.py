"""Log-probs and entropies of the response tokens of packed samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from limes.models.flops import dense_tokens
from limes.models.log_probs import LogProbs
from limes.models.policy import Policy
from limes.records import Sample
from limes.training.packing import PackedBatch, pack
from limes.training.parallel.context import ContextCut
from limes.training.parallel.models import ranks_of
from limes.training.parallel.sharding import reshard
from limes.training.plan import plan_micro_batches

IDLE_TOKENS = (0, 0)
"""What a rank without samples computes, so that the others do not wait for it."""


@dataclass(frozen=True)
class TokenOutputs:
    """One value a response token, samples end to end, `[T]` each.

    Attributes:
        log_probs: of the tokens, at the sampling temperature.
        entropy: of the distributions they were drawn from.
        num_computed: tokens that went through the model.
    """

    log_probs: Tensor
    entropy: Tensor
    num_computed: int


class PackedForward:
    """Runs packs of samples through a policy.

    Args:
        temperature: the sampling temperature; log-probs and entropies are those of the tempered distribution.
        head_chunk: rows of logits at a time.
        share_prefixes: compute common beginnings once.
        entropy_grad: the loss has an entropy term.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        temperature: float,
        head_chunk: int,
        share_prefixes: bool = True,
        entropy_grad: bool = False,
    ) -> None:
        self.policy = policy
        self.share_prefixes = share_prefixes
        self.ranks = ranks_of(policy)
        self._network = LogProbs(policy.model) if policy.network is None else policy.network
        self._settings = {"temperature": temperature, "chunk": head_chunk, "entropy_grad": entropy_grad}
        self._dense_tokens = dense_tokens(policy.model.config) if self.ranks.layout.cp > 1 else 0.0

    def __call__(self, samples: Sequence[Sample]) -> TokenOutputs:
        """Outputs of the samples' response tokens, in the order given; with gradients if they are enabled."""
        return self.outputs(self.pack(samples))

    @torch.no_grad()
    def score(self, samples: Sequence[Sample], max_tokens: int) -> Tensor:
        """Log-probs of the samples' response tokens, `[T]`, in passes of at most `max_tokens` tokens."""
        lengths = [sample.response_length for sample in samples]
        found: dict[int, Tensor] = {}
        for indices in self.plan(samples, max_tokens):
            if not indices:
                self.idle()
                continue
            log_probs = self([samples[i] for i in indices]).log_probs
            found.update(zip(indices, log_probs.split([lengths[i] for i in indices]), strict=True))
        if not self.ranks.is_alone:
            reshard(self._network)
        nothing = torch.empty(0, device=self.policy.device)
        return torch.cat([nothing, *(found[i] for i in range(len(samples)))])

    def plan(self, samples: Sequence[Sample], max_tokens: int) -> list[list[int]]:
        """Micro-batches of at most `max_tokens` tokens, as many on every rank."""
        tokens = [sample.tokens for sample in samples]
        return plan_micro_batches(tokens, max_tokens, share=self.share_prefixes, ranks=self.ranks)

    def idle(self) -> Tensor:
        """Take part in a pass of the other ranks: a scalar whose gradients are zeros."""
        return self.outputs(pack([IDLE_TOKENS], [1], self.policy.device)).log_probs.sum() * 0.0

    def pack(self, samples: Sequence[Sample]) -> PackedBatch:
        """The packed form of some samples."""
        lengths = [sample.response_length for sample in samples]
        return pack([s.tokens for s in samples], lengths, self.policy.device, share=self.share_prefixes)

    def outputs(self, batch: PackedBatch) -> TokenOutputs:
        """See `__call__`."""
        cut = None
        if self.ranks.layout.cp > 1:
            cut = ContextCut(batch, self.ranks.cp_group, self.policy.device, dense_tokens=self._dense_tokens)
        part = batch if cut is None else cut.part
        log_probs_M, entropies_P = self._network(
            part.token_ids, part.positions, part.attention, part.head_rows, part.targets, self._settings
        )
        if cut is not None:
            log_probs_M, entropies_P = cut.gather_pairs(log_probs_M), cut.gather_rows(entropies_P)
        return TokenOutputs(
            log_probs=log_probs_M.index_select(0, batch.pair_index),
            entropy=entropies_P.index_select(0, batch.head_row_index),
            num_computed=len(batch.token_ids),
        )
