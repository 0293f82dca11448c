"""AdamW with float32 state and float32 gradient sums, whatever type the parameters have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from limes.config.trainer import TrainerConfig


class PolicyOptimizer:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) on float32 masters.

    A float32 or float64 parameter is its own master. A narrower one has a float32 copy that takes the step and is then
    rounded into the parameter, in place: whoever shares the parameter's memory sees the new weights.

    Args:
        named_parameters: what is trained, each tensor once. Weight decay leaves out vectors: biases and norms.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], config: TrainerConfig) -> None:
        self.names: list[str] = []
        self.parameters: list[nn.Parameter] = []
        self.masters: list[Tensor] = []
        for name, parameter in named_parameters:
            own = parameter.dtype in (torch.float32, torch.float64)
            self.names.append(name)
            self.parameters.append(parameter)
            self.masters.append(parameter if own else nn.Parameter(parameter.detach().float()))
        moving = [master for master in self.masters if master.numel()]  # a rank may have no part of a tensor
        decayed = [master for master in moving if master.dim() >= 2]
        plain = [master for master in moving if master.dim() < 2]
        self.max_norm = config.clip_grad
        self.adam = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )

    def accumulate(self) -> None:
        """Add the gradients of a backward pass to the masters' sums, in float32."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is parameter or parameter.grad is None:
                continue
            grad = parameter.grad.float()
            master.grad = grad if master.grad is None else master.grad.add_(grad)
            parameter.grad = None

    def step(self, lr: float) -> float:
        """Clip, take one step at rate `lr` and forget the gradients; nothing moves if the gradient is not finite.

        Returns:
            The norm of the whole gradient before clipping.
        """
        norm = self._total_norm()
        if torch.isfinite(norm):
            if self.max_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(self.masters, self.max_norm, norm)
            for group in self.adam.param_groups:
                group["lr"] = lr
            self.adam.step()
            self._round_into_parameters()
        self.adam.zero_grad(set_to_none=True)
        return float(norm)

    def state_dict(self) -> dict[str, Any]:
        """Moments and step counts, and the masters that are not the parameters themselves, by parameter name."""
        by_name = {}
        for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
            state = dict(self.adam.state.get(master, {}))
            by_name[name] = state if master is parameter else state | {"master": master.detach()}
        return by_name

    def load_state_dict(self, by_name: dict[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            ValueError: the names differ.
        """
        if set(by_name) != set(self.names):
            other = sorted(set(by_name) ^ set(self.names))
            raise ValueError(
                f"the saved optimizer is of another model: {other[:3]} and {len(other)} names in all differ"
            )
        for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
            state = dict(by_name[name])
            with torch.no_grad():
                master.copy_(state.pop("master", parameter))
            if state:
                self.adam.state[master] = {key: _placed(key, value, master) for key, value in state.items()}
        self._round_into_parameters()

    def _total_norm(self) -> Tensor:
        return torch.nn.utils.get_total_norm([m.grad for m in self.masters if m.grad is not None])

    @torch.no_grad()
    def _round_into_parameters(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)


def _placed(key: str, value: Tensor, master: Tensor) -> Tensor:
    """The step count stays float32; moments go to the master's device and type."""
    return value.to(master.device) if key == "step" else value.to(master.device, master.dtype)
