"""The critic's network: built from a model folder, saved as one, loaded again."""

from pathlib import Path

import pytest
import torch
from tiny import save_tiny, tiny_model
from transformers import AutoModel

from limes.config.model import ModelConfig
from limes.models.value_head import HEAD, ValueModel, load_value_model, make_value_model, read_value_model


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


def test_what_is_no_critic_or_another_one_is_refused(tmp_path: Path) -> None:
    model = read_value_model(save_tiny(tmp_path / "a"), torch.float32)
    with pytest.raises(ValueError, match=f"holds no critic: it lacks {HEAD}"):
        model.load(tmp_path / "a")
    read_value_model(save_tiny(tmp_path / "b", num_layers=3), torch.float32).save(tmp_path / "other")
    with pytest.raises(ValueError, match="another critic"):
        model.load(tmp_path / "other")
    with pytest.raises(ValueError, match=r"critic\.path = .*nowhere: no such folder"):
        load_value_model(ModelConfig(), str(tmp_path / "nowhere"))
