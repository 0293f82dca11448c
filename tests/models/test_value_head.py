"""The critic's network: built from a model folder, saved as one, loaded again."""

import copy
from pathlib import Path

import pytest
import torch
from tiny import save_tiny, tiny_model
from transformers import AutoModel, GPT2Config, GPTNeoConfig, LlamaConfig, MistralConfig, NemotronConfig

from limes.config.model import ModelConfig
from limes.models.value_head import (
    HEAD,
    ValueModel,
    load_value_model,
    make_checked_value_model,
    make_value_model,
    read_value_model,
)

SMALL = {
    "vocab_size": 102,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SMALL_GPT_NEO = {
    "vocab_size": 102,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global"], 2]],
    "max_position_embeddings": 64,
}


def parameters_of(model: ValueModel) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_it_has_the_layers_of_the_folder_and_a_head_that_says_0(tmp_path: Path, family: str, tied: bool) -> None:
    folder = save_tiny(tmp_path, family, tied=tied)
    model = load_value_model(ModelConfig(device="cpu"), str(folder))
    for name, value in AutoModel.from_pretrained(folder).named_parameters():
        assert torch.equal(parameters_of(model)[f"backbone.{name}"], value), name
    assert not model.values(torch.randn(5, 32)).any()
    assert "lm_head" not in " ".join(parameters_of(model))


def test_the_head_is_in_float32_whatever_type_the_layers_have(tmp_path: Path) -> None:
    model = load_value_model(ModelConfig(device="cpu", dtype="bfloat16"), str(save_tiny(tmp_path)))
    assert model.backbone.dtype == torch.bfloat16
    assert model.head.weight.dtype == model.values(torch.randn(2, 32, dtype=torch.bfloat16)).dtype == torch.float32
    assert make_value_model(tiny_model(dtype=torch.float64).model).head.weight.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_saved_as_a_plain_folder_and_loaded_to_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    model = read_value_model(save_tiny(tmp_path / "a"), dtype)
    torch.nn.init.normal_(model.head.weight)  # has bits that bfloat16 would lose
    model.save(tmp_path / "critic")
    plain = AutoModel.from_pretrained(tmp_path / "critic", dtype=dtype)
    other = read_value_model(save_tiny(tmp_path / "b", seed=1), dtype)
    pointers = [p.data_ptr() for _, p in other.named_parameters()]
    other.load(tmp_path / "critic")
    again = load_value_model(ModelConfig(device="cpu", dtype=str(dtype)[6:]), str(tmp_path / "critic"))
    for name, value in model.named_parameters():
        assert torch.equal(parameters_of(other)[name], value), name
        assert torch.equal(parameters_of(again)[name], value), name
    for name, value in plain.named_parameters():
        assert torch.equal(parameters_of(model)[f"backbone.{name}"], value), name
    assert pointers == [p.data_ptr() for _, p in other.named_parameters()]


@pytest.mark.parametrize(
    "settings",
    [
        LlamaConfig(**SMALL),
        MistralConfig(**SMALL, sliding_window=16),
        GPT2Config(vocab_size=102, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    ],
    ids=lambda settings: settings.model_type,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_say_the_same_when_packed_are_served(settings, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = make_checked_value_model(AutoModel.from_config(copy.deepcopy(settings), dtype=dtype), "a/critic")
    assert not model.backbone.training


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (GPTNeoConfig(**SMALL_GPT_NEO), "its 2 layers attend by themselves"),
        (NemotronConfig(**SMALL), "no attention_plan reaches its attention"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_layers_that_would_say_something_else_are_refused(settings, message: str) -> None:
    with pytest.raises(ValueError, match=f"a/critic: {settings.model_type} failed its check.*{message}.*Llama"):
        make_checked_value_model(AutoModel.from_config(settings), "a/critic")


def test_layers_that_count_positions_otherwise_or_are_not_finite_are_refused() -> None:
    broken = AutoModel.from_config(LlamaConfig(**SMALL))
    with torch.no_grad():
        broken.norm.weight.fill_(torch.nan)
    shifted = AutoModel.from_config(GPT2Config(vocab_size=102, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    shifted.wpe.register_forward_hook(lambda module, args, out: out * torch.linspace(1, 9, out.shape[-2])[:, None])
    for model, distance in ((broken, "nan"), (shifted, "[0-9.]+")):
        with pytest.raises(ValueError, match=f"final hidden state differs from the model's own by {distance}"):
            make_checked_value_model(model, "a/critic")


def test_what_is_no_critic_or_another_one_is_refused(tmp_path: Path) -> None:
    model = read_value_model(save_tiny(tmp_path / "a"), torch.float32)
    with pytest.raises(ValueError, match=f"holds no critic: it lacks {HEAD}"):
        model.load(tmp_path / "a")
    read_value_model(save_tiny(tmp_path / "b", num_layers=3), torch.float32).save(tmp_path / "other")
    with pytest.raises(ValueError, match="another critic"):
        model.load(tmp_path / "other")
    with pytest.raises(ValueError, match=r"critic\.path = .*nowhere: no such folder"):
        load_value_model(ModelConfig(), str(tmp_path / "nowhere"))
