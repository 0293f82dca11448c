"""Log-probs and entropies from the LM head, a chunk of rows at a time, with their own backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from limes.models.cpu_linear import head_logits


@dataclass(frozen=True)
class HeadTargets:
    """Which (hidden row, token) pairs are scored.

    Pairs are sorted by row: those of hidden row p are `offsets[p] .. offsets[p + 1]`, so one row of logits serves all
    tokens that followed it.

    Attributes:
        row_M: hidden row of each pair, int64, not decreasing.
        token_M: token id of each pair, int64.
        offsets: one more entry than there are hidden rows.
    """

    row_M: Tensor
    token_M: Tensor
    offsets: list[int]

    def __post_init__(self) -> None:
        counts = torch.bincount(self.row_M, minlength=len(self.offsets) - 1)
        assert counts.tolist() == [end - start for start, end in pairwise(self.offsets)], "offsets count rows' pairs"
        assert bool((self.row_M.diff() >= 0).all()), "pairs are sorted by row"


def head_log_probs(
    hidden_PE: Tensor,
    weight_VE: Tensor,
    targets: HeadTargets,
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each pair and entropy of each hidden row, of softmax(hidden @ weight.T / temperature).

    At most `[chunk, V]` logits exist at a time. Those of the last chunk are kept for the backward pass, which computes
    the others again. Softmax runs in float32 (float64 for float64 input).

    Args:
        hidden_PE: final hidden states of the rows that are scored.
        weight_VE: the LM head.
        temperature: the sampling temperature, above 0.
        chunk: rows of logits at a time.
        entropy_grad: let gradients flow through the entropies; they are detached otherwise.

    Returns:
        log_probs `[M]` and entropies `[P]`, float32 (float64 for float64 input).
    """
    assert temperature > 0
    assert len(targets.offsets) == hidden_PE.shape[0] + 1
    log_probs, entropies = _HeadLogProbs.apply(hidden_PE, weight_VE, targets, temperature, chunk)
    return log_probs, entropies if entropy_grad else entropies.detach()


class _HeadLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_PE: Tensor, weight_VE: Tensor, targets: HeadTargets, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        num_rows = hidden_PE.shape[0]
        dtype = torch.float64 if hidden_PE.dtype == torch.float64 else torch.float32
        log_probs = hidden_PE.new_empty(targets.token_M.shape[0], dtype=dtype)
        normalisers = hidden_PE.new_empty(num_rows, dtype=dtype)
        entropies = hidden_PE.new_empty(num_rows, dtype=dtype)
        for start in range(0, num_rows, chunk):
            end = min(start + chunk, num_rows)
            logits_CV = _tempered_logits(hidden_PE[start:end], weight_VE, temperature)
            pairs = slice(targets.offsets[start], targets.offsets[end])
            row_M, token_M = targets.row_M[pairs] - start, targets.token_M[pairs]
            peak = logits_CV.amax(-1, keepdim=True)
            shifted_CV = logits_CV.sub_(peak)
            chosen = shifted_CV[row_M, token_M]
            probs_CV = shifted_CV.exp()
            sum_C = probs_CV.sum(-1)
            normalisers[start:end] = sum_C.log() + peak[:, 0]
            entropies[start:end] = sum_C.log() - probs_CV.mul_(shifted_CV).sum(-1) / sum_C
            log_probs[pairs] = chosen - sum_C.log().index_select(0, row_M)
            ctx.last_log_p_CV = shifted_CV.sub_(sum_C.log()[:, None]) if end == num_rows else None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_PE, weight_VE, normalisers, entropies)
        ctx.targets, ctx.temperature, ctx.chunk = targets, temperature, chunk
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor | None, None, None, None]:
        grad_log_probs_M, grad_entropies_P = grads
        hidden_PE, weight_VE, normalisers, entropies = ctx.saved_tensors
        targets: HeadTargets = ctx.targets
        grad_hidden = torch.empty_like(hidden_PE)
        grad_weight: Tensor | None = None
        if grad_log_probs_M is None:
            grad_log_probs_M = normalisers.new_zeros(targets.token_M.shape[0])
        for start in range(0, hidden_PE.shape[0], ctx.chunk):
            end = min(start + ctx.chunk, hidden_PE.shape[0])
            pairs = slice(targets.offsets[start], targets.offsets[end])
            row_M, token_M, grad_M = targets.row_M[pairs] - start, targets.token_M[pairs], grad_log_probs_M[pairs]
            if end == hidden_PE.shape[0] and ctx.last_log_p_CV is not None:
                log_p_CV, ctx.last_log_p_CV = ctx.last_log_p_CV, None  # what follows overwrites it
            else:
                log_p_CV = _tempered_logits(hidden_PE[start:end], weight_VE, ctx.temperature)
                log_p_CV.sub_(normalisers[start:end, None])
            pull_C = grad_M.new_zeros(end - start).index_add_(0, row_M, grad_M)
            if grad_entropies_P is None:
                grad_CV = log_p_CV.exp_().mul_(pull_C.neg_()[:, None])
            else:  # dH/dlogit_j = -p_j (log p_j + H)
                push_C = grad_entropies_P[start:end]
                slope_CV = (log_p_CV + entropies[start:end, None]).mul_(push_C[:, None]).add_(pull_C[:, None])
                grad_CV = log_p_CV.exp_().mul_(slope_CV).neg_()
            grad_CV.view(-1).index_add_(0, row_M * weight_VE.shape[0] + token_M, grad_M)
            grad_CV = grad_CV.div_(ctx.temperature).to(hidden_PE.dtype)
            torch.mm(grad_CV, weight_VE, out=grad_hidden[start:end])
            grad_weight = _plus_outer(grad_weight, grad_CV, hidden_PE[start:end], normalisers.dtype)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight_VE.dtype), None, None, None


def _plus_outer(total_VE: Tensor | None, grad_CV: Tensor, hidden_CE: Tensor, dtype: torch.dtype) -> Tensor:
    """`total + grad.T @ hidden`, summed in `dtype`; in place from the second chunk on."""
    if total_VE is None:
        return torch.mm(grad_CV.T, hidden_CE).to(dtype)
    return total_VE.addmm_(grad_CV.T, hidden_CE) if dtype == hidden_CE.dtype else total_VE.add_(grad_CV.T @ hidden_CE)


def _tempered_logits(hidden_CE: Tensor, weight_VE: Tensor, temperature: float) -> Tensor:
    logits_CV = head_logits(hidden_CE, weight_VE)
    if logits_CV.dtype not in (torch.float32, torch.float64):
        logits_CV = logits_CV.float()
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)
