"""A critic's network: the layers of a language model with one number a token on top."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from limes.config.model import ModelConfig
from limes.models.attention import AttentionPlan, use_limes_attention
from limes.models.cpu_linear import use_cpu_linears
from limes.models.load import failed_check, pick_device, pick_dtype, refuse_unsupported
from limes.models.self_check import check_hidden, own_outputs

HEAD = "value_head.safetensors"
"""The head's file in a critic's folder; everything else in it is a plain model folder of transformers."""


class ValueNetwork(nn.Module):
    """Values of some of the packed tokens; its parameters are those of backbone and head."""

    def __init__(self, backbone: PreTrainedModel, head: nn.Linear) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, token_ids_N: Tensor, positions_N: Tensor, plan: AttentionPlan, head_rows_P: Tensor) -> Tensor:
        """`[P, 1]` in the head's type. The sampling temperature has no part in it."""
        output = self.backbone(
            input_ids=token_ids_N[None], position_ids=positions_N[None], use_cache=False, attention_plan=plan
        )
        hidden_PE = output.last_hidden_state[0].index_select(0, head_rows_P)
        return self.head(hidden_PE.to(self.head.weight.dtype))


@dataclass
class ValueModel:
    """Layers ready for packed forward passes, and the head.

    Attributes:
        backbone: a transformers model without LM head, attending through plans.
        head: from the final hidden state to the value; in float32 at least, whatever type the layers have.
        network: both, as one module with one forward pass; a model on many ranks has one with hooks.
    """

    backbone: PreTrainedModel
    head: nn.Linear
    network: ValueNetwork | None = None

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return self.head.weight.device

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All that is trained, each tensor once."""
        for name, parameter in self.backbone.named_parameters():
            yield f"backbone.{name}", parameter
        for name, parameter in self.head.named_parameters():
            yield f"head.{name}", parameter

    def hidden(self, token_ids_N: Tensor, positions_N: Tensor, plan: AttentionPlan) -> Tensor:
        """Final hidden states `[N, E]` of packed tokens."""
        output = self.backbone(
            input_ids=token_ids_N[None], position_ids=positions_N[None], use_cache=False, attention_plan=plan
        )
        return output.last_hidden_state[0]

    def values(self, hidden_PE: Tensor) -> Tensor:
        """The value of each hidden state, `[P]`, in the head's type. The sampling temperature has no part in it."""
        return self.head(hidden_PE.to(self.head.weight.dtype)).squeeze(-1)

    def save(self, folder: Path) -> None:
        """Write a model folder with the head's file in it."""
        self.backbone.save_pretrained(folder)
        save_file({name: value.contiguous() for name, value in self.head.state_dict().items()}, folder / HEAD)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Copy what `save` wrote into the own tensors, where they lie.

        Raises:
            ValueError: the folder holds no critic, or another one.
        """
        if not (folder / HEAD).is_file():
            raise ValueError(f"{folder} holds no critic: it lacks {HEAD}")
        other = read_value_model(folder, self.backbone.dtype)
        own, new = dict(self.named_parameters()), dict(other.named_parameters())
        wrong = [n for n in {**own, **new} if n not in own or n not in new or own[n].shape != new[n].shape]
        if wrong:
            raise ValueError(f"{folder} holds another critic: {wrong[:3]} and {len(wrong)} tensors in all differ")
        for name, parameter in own.items():
            parameter.copy_(new[name])


def make_value_model(backbone: PreTrainedModel) -> ValueModel:
    """Put a head that says 0 for everything on a model without LM head, in place."""
    use_limes_attention(backbone)
    use_cpu_linears(backbone)
    backbone.eval()
    dtype = torch.promote_types(backbone.dtype, torch.float32)
    head = nn.Linear(backbone.config.get_text_config().hidden_size, 1, device=backbone.device, dtype=dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return ValueModel(backbone, head)


def make_checked_value_model(backbone: PreTrainedModel, path: str) -> ValueModel:
    """`make_value_model`, with layers that are sure to say what they said by themselves.

    Raises:
        ValueError: they do not.
    """
    try:
        own = own_outputs(backbone.eval())
        model = make_value_model(backbone)
        check_hidden(model, own)
    except Exception as error:
        raise ValueError(f"{path}: {failed_check(backbone, error)}") from error
    return model


def read_value_model(
    folder: Path, dtype: torch.dtype, device: torch.device | None = None, *, trust_remote_code: bool = False
) -> ValueModel:
    """A critic from a model folder: with the head that is saved in it, or a new one.

    Raises:
        ValueError: the model is of a kind that packed attention does not serve, or fails its check.
    """
    settings = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    refuse_unsupported(settings, str(folder))
    backbone = AutoModel.from_pretrained(folder, dtype=dtype, trust_remote_code=trust_remote_code)
    model = make_checked_value_model(backbone.to(device or torch.device("cpu")), str(folder))
    if (folder / HEAD).is_file():
        model.head.load_state_dict(load_file(folder / HEAD))
    return model


def load_value_model(
    config: ModelConfig, path: str, *, notice: Callable[[str], None] = lambda text: None
) -> ValueModel:
    """The critic's network at `path`, on the device and in the type of `config`.

    Args:
        path: what `critic.path` may be.

    Raises:
        ValueError: the model cannot be found or is of a kind that is not served.
    """
    from limes.models.source import resolve_model

    try:
        folder = resolve_model(path, notice=notice)
    except ValueError as error:
        raise ValueError(str(error).replace("model.path", "critic.path")) from error
    device = pick_device(config.device)
    return read_value_model(
        folder, pick_dtype(config.dtype, device), device, trust_remote_code=config.trust_remote_code
    )
