"""Log-probs and entropies of the response tokens of packed samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from limes.models.lm_head import head_log_probs
from limes.models.policy import Policy
from limes.records import Sample
from limes.training.packing import PackedBatch, cut_micro_batches, pack


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
        self.temperature = temperature
        self.head_chunk = head_chunk
        self.share_prefixes = share_prefixes
        self.entropy_grad = entropy_grad

    def __call__(self, samples: Sequence[Sample]) -> TokenOutputs:
        """Outputs of the samples' response tokens, in the order given; with gradients if they are enabled."""
        return self.outputs(self.pack(samples))

    @torch.no_grad()
    def score(self, samples: Sequence[Sample], max_tokens: int) -> Tensor:
        """Log-probs of the samples' response tokens, `[T]`, in passes of at most `max_tokens` tokens."""
        lengths = [sample.response_length for sample in samples]
        found: dict[int, Tensor] = {}
        for indices in cut_micro_batches([s.tokens for s in samples], max_tokens, share=self.share_prefixes):
            log_probs = self([samples[i] for i in indices]).log_probs
            found.update(zip(indices, log_probs.split([lengths[i] for i in indices]), strict=True))
        nothing = torch.empty(0, device=self.policy.device)
        return torch.cat([nothing, *(found[i] for i in range(len(samples)))])

    def pack(self, samples: Sequence[Sample]) -> PackedBatch:
        """The packed form of some samples."""
        lengths = [sample.response_length for sample in samples]
        return pack([s.tokens for s in samples], lengths, self.policy.device, share=self.share_prefixes)

    def outputs(self, batch: PackedBatch) -> TokenOutputs:
        """See `__call__`."""
        hidden_NE = self.policy.hidden(batch.token_ids, batch.positions, batch.attention)
        log_probs_M, entropies_P = head_log_probs(
            hidden_NE.index_select(0, batch.head_rows),
            self.policy.head_weight,
            batch.targets,
            temperature=self.temperature,
            chunk=self.head_chunk,
            entropy_grad=self.entropy_grad,
        )
        return TokenOutputs(
            log_probs=log_probs_M.index_select(0, batch.pair_index),
            entropy=entropies_P.index_select(0, batch.head_row_index),
            num_computed=len(batch.token_ids),
        )
