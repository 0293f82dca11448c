"""Log-probs and entropies of the response tokens of packed samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from limes.models.log_probs import LogProbs
from limes.models.policy import Policy
from limes.records import Sample
from limes.training.packed_pass import PackedPass
from limes.training.packing import PackedBatch


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


class PackedForward(PackedPass):
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
        network = LogProbs(policy.model) if policy.network is None else policy.network
        dtype = torch.promote_types(policy.dtype, torch.float32)
        super().__init__(policy, network, policy.model.config, share_prefixes=share_prefixes, dtype=dtype)
        self._settings = {"temperature": temperature, "chunk": head_chunk, "entropy_grad": entropy_grad}

    def __call__(self, samples: Sequence[Sample]) -> TokenOutputs:
        """Outputs of the samples' response tokens, in the order given; with gradients if they are enabled."""
        return self.outputs(self.pack(samples))

    def token_values(self, batch: PackedBatch) -> Tensor:
        """The log-probs; see `PackedPass.token_values`."""
        return self.outputs(batch).log_probs

    def outputs(self, batch: PackedBatch) -> TokenOutputs:
        """See `__call__`."""
        part, cut = self.own_part(batch)
        log_probs_M, entropies_P = self.network(
            part.token_ids, part.positions, part.attention, part.head_rows, part.targets, self._settings
        )
        if cut is not None:
            log_probs_M, entropies_P = cut.gather_pairs(log_probs_M), cut.gather_rows(entropies_P)
        return TokenOutputs(
            log_probs=log_probs_M.index_select(0, batch.pair_index),
            entropy=entropies_P.index_select(0, batch.head_row_index),
            num_computed=len(batch.token_ids),
        )
