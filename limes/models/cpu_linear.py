"""Matrix products that are faster on CPUs for the shapes of decoding and of the LM head. No parameter is copied."""

from __future__ import annotations

import torch
from torch import Tensor, nn

MAX_ROWS = 512


class CpuLinear(nn.Linear):
    """`nn.Linear` with the same parameters; without gradients and for few rows it computes `(W @ x.T).T`.

    BLAS libraries split the long side of a product over cores; with the weight on the left that is the weight's side.
    """

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`."""
        rows = x.numel() // x.shape[-1]
        if rows > MAX_ROWS or x.device.type != "cpu" or torch.is_grad_enabled():
            return super().forward(x)
        out = torch.mm(self.weight, x.reshape(rows, -1).T).T
        if self.bias is not None:
            out = out + self.bias
        return out.reshape(*x.shape[:-1], -1)


def use_cpu_linears(model: nn.Module) -> None:
    """Make the plain linear layers of a model on a CPU `CpuLinear`s; parameters stay the same tensors."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.device.type == "cpu":
            module.__class__ = CpuLinear


def head_logits(hidden_PE: Tensor, weight_VE: Tensor) -> Tensor:
    """`hidden @ weight.T` without gradients; in float32 on a CPU by oneDNN, which serves the long side V best."""
    # not a public name of torch: the plain product stands in where it is missing
    onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if onednn is None or hidden_PE.device.type != "cpu" or hidden_PE.dtype != torch.float32:
        return torch.mm(hidden_PE, weight_VE.T)
    with torch.no_grad():
        return onednn(hidden_PE, weight_VE, None, "none", [], "")
