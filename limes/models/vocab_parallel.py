"""Log-probs and entropies where each rank has some rows of the LM head; `limes.models.lm_head` is for one with all.

A chunk's peak, its sum of exponentials, the chosen logits and the entropies are put together over the ranks; logits
themselves never travel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from limes.models.lm_head import HeadTargets


def vocab_parallel_log_probs(
    hidden_PE: Tensor,
    weight_VE: Tensor,
    targets: HeadTargets,
    *,
    first_row: int,
    group: dist.ProcessGroup,
    temperature: float = 1.0,
    chunk: int = 1024,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `lm_head.head_log_probs`, the same on every rank.

    Args:
        hidden_PE: the same on every rank; its gradients add up.
        weight_VE: this rank's rows of the LM head, from token id `first_row` on.
        group: of the ranks that have the others.
    """
    log_probs, entropies = _VocabParallel.apply(hidden_PE, weight_VE, targets, temperature, chunk, first_row, group)
    return log_probs, entropies if entropy_grad else entropies.detach()


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_PE: Tensor,
        weight_VE: Tensor,
        targets: HeadTargets,
        temperature: float,
        chunk: int,
        first_row: int,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_PE.dtype, torch.float32)
        num_rows = hidden_PE.shape[0]
        log_probs = hidden_PE.new_empty(targets.token_M.shape[0], dtype=dtype)
        normalisers, entropies = (hidden_PE.new_empty(num_rows, dtype=dtype) for _ in range(2))
        for start in range(0, num_rows, chunk):
            end = min(start + chunk, num_rows)
            pairs = slice(targets.offsets[start], targets.offsets[end])
            logits_CV = _logits(hidden_PE[start:end], weight_VE, temperature, dtype)
            peak_C = logits_CV.amax(-1)
            dist.all_reduce(peak_C, op=dist.ReduceOp.MAX, group=group)
            logits_CV.sub_(peak_C[:, None])
            row_M, place_M, own_M = _own_targets(targets, pairs, start, first_row, weight_VE.shape[0])
            chosen_M = torch.where(own_M, logits_CV[row_M, place_M], 0.0)
            probs_CV = logits_CV.exp()
            parts = torch.cat([probs_CV.sum(-1), probs_CV.mul_(logits_CV).sum(-1), chosen_M])
            dist.all_reduce(parts, group=group)
            sum_C, weighted_C, chosen_M = parts.split([end - start, end - start, len(chosen_M)])
            normalisers[start:end] = sum_C.log() + peak_C
            entropies[start:end] = sum_C.log() - weighted_C / sum_C
            log_probs[pairs] = chosen_M - sum_C.log().index_select(0, row_M)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_PE, weight_VE, normalisers, entropies)
        ctx.targets, ctx.temperature, ctx.chunk, ctx.first_row, ctx.group = (
            targets,
            temperature,
            chunk,
            first_row,
            group,
        )
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_PE, weight_VE, normalisers, entropies = ctx.saved_tensors
        targets: HeadTargets = ctx.targets
        grad_log_probs_M = grads[0] if grads[0] is not None else normalisers.new_zeros(targets.token_M.shape[0])
        grad_hidden = torch.empty_like(hidden_PE, dtype=normalisers.dtype)
        grad_weight = torch.zeros_like(weight_VE, dtype=normalisers.dtype)
        for start in range(0, hidden_PE.shape[0], ctx.chunk):
            end = min(start + ctx.chunk, hidden_PE.shape[0])
            pairs = slice(targets.offsets[start], targets.offsets[end])
            row_M, place_M, own_M = _own_targets(targets, pairs, start, ctx.first_row, weight_VE.shape[0])
            grad_M = grad_log_probs_M[pairs]
            log_p_CV = _logits(hidden_PE[start:end], weight_VE, ctx.temperature, normalisers.dtype)
            log_p_CV.sub_(normalisers[start:end, None])
            slope_C = -grad_M.new_zeros(end - start).index_add_(0, row_M, grad_M)
            if grads[1] is None:
                grad_CV = log_p_CV.exp_().mul_(slope_C[:, None])
            else:  # dH/dlogit_j = -p_j (log p_j + H)
                push_CV = (log_p_CV + entropies[start:end, None]).mul_(grads[1][start:end, None])
                grad_CV = log_p_CV.exp_().mul_(slope_C[:, None] - push_CV)
            grad_CV.index_put_((row_M, place_M), torch.where(own_M, grad_M, 0.0), accumulate=True)
            grad_CV = grad_CV.div_(ctx.temperature).to(hidden_PE.dtype)
            grad_hidden[start:end] = grad_CV @ weight_VE
            grad_weight += grad_CV.T @ hidden_PE[start:end]
        dist.all_reduce(grad_hidden, group=ctx.group)
        return grad_hidden.to(hidden_PE.dtype), grad_weight.to(weight_VE.dtype), None, None, None, None, None


def _logits(hidden_CE: Tensor, weight_VE: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    return (hidden_CE @ weight_VE.T).to(dtype).div_(temperature)


def _own_targets(
    targets: HeadTargets, pairs: slice, start: int, first_row: int, num_own: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each pair of a chunk: its row, a column of this rank, and whether that column is the token's."""
    place_M = targets.token_M[pairs] - first_row
    own_M = (place_M >= 0) & (place_M < num_own)
    return targets.row_M[pairs] - start, place_M.masked_fill(~own_M, 0), own_M
