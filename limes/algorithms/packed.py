"""Packed sequences: the tokens of many sequences end to end in one 1-D tensor, with a length for each sequence.

Masks select and never multiply: what stands under a masked-out position, NaN included, reaches no value and no
gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Lengths = Tensor | Sequence[int]

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to this size before `exp`: e^20 is far outside every window, and float32 holds it."""


def check_packed(**tensors: Tensor | None) -> None:
    """Refuse per-token inputs that would broadcast silently.

    Raises:
        ValueError: a tensor is not 1-D, or two differ in length.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) > 1:
        raise ValueError(f"per-token inputs must be 1-D and equally long, got {shapes}")


def as_lengths(lengths: Lengths, num_tokens: int, device: torch.device) -> Tensor:
    """Lengths as an int64 tensor `[num_sequences]` on `device`.

    Raises:
        ValueError: they do not sum to the number of tokens.
    """
    tensor = torch.as_tensor(lengths, dtype=torch.int64)
    if int(tensor.sum()) != num_tokens:
        raise ValueError(f"lengths sum to {int(tensor.sum())}, but there are {num_tokens} tokens")
    return tensor.to(device)


def select(values: Tensor, mask: Tensor | None, fill: float = 0.0) -> Tensor:
    """`values` where the mask is not 0 and `fill` elsewhere; no gradient passes elsewhere. No mask selects all."""
    return values if mask is None else torch.where(mask != 0, values, fill)


def sequence_sums(values: Tensor, lengths: Lengths) -> Tensor:
    """Sum of each sequence, `[num_sequences]`, in the dtype of `values`; an empty sequence sums to 0."""
    lengths = as_lengths(lengths, values.numel(), values.device)
    if values.numel() == 0:
        return values.sum() + values.new_zeros(lengths.numel())
    return torch.segment_reduce(values, "sum", lengths=lengths, initial=0.0)


def trained_lengths(mask: Tensor, lengths: Lengths) -> Tensor:
    """Masked-in tokens of each sequence, int64 `[num_sequences]`."""
    return sequence_sums((mask != 0).double(), lengths).long()


def repeat_per_token(per_sequence: Tensor, lengths: Lengths, num_tokens: int) -> Tensor:
    """Give each token the value of its sequence, `[num_tokens]`."""
    lengths = as_lengths(lengths, num_tokens, per_sequence.device)
    if per_sequence.shape != lengths.shape:
        raise ValueError(f"{per_sequence.numel()} values for {lengths.numel()} sequences")
    return per_sequence.repeat_interleave(lengths, output_size=num_tokens)


def ratio(log_ratio: Tensor) -> Tensor:
    """exp of a log ratio clamped to `LOG_RATIO_LIMIT`; the clamped part passes no gradient."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
