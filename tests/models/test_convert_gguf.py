"""A GGUF file becomes a plain folder with the same function and the right tokens."""

import pytest
import torch
from tiny_gguf import TOKENS, gguf_source_model, write_gguf
from transformers import AutoModelForCausalLM

from limes.models.convert_gguf import convert
from limes.models.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("gguf")
    convert(write_gguf(base / "tiny.gguf"), base / "model")
    return base / "model"


def test_converted_weights_are_those_of_the_file(folder):
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    original = gguf_source_model().state_dict()
    weights = converted.state_dict()
    assert weights.keys() == original.keys()
    assert all(torch.equal(weights[name], original[name]) for name in original)
    assert converted.lm_head.weight.data_ptr() == converted.model.embed_tokens.weight.data_ptr()
    assert not hasattr(converted.config, "quantization_config")
    assert converted.config.eos_token_id == 2


def test_tokenizer_has_the_tokens_and_template_of_the_file(folder):
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "<|end|>", "<|end|>")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "he"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [TOKENS[i] for i in ids] == ["<|user|>", "he", "<|end|>", "<|assistant|>"]


@pytest.mark.parametrize(("pre", "expected"), [("smollm", ["ĊĊ", "1", "2"]), ("default", ["Ċ", "Ċ", "1", "2"])])
def test_white_space_before_digits_follows_the_pre_tokenizer_of_the_file(tmp_path, pre, expected):
    convert(write_gguf(tmp_path / "tiny.gguf", pre=pre), tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    assert tokenizer.convert_ids_to_tokens(tokenizer("\n\n12")["input_ids"]) == expected


def test_missing_weights_are_refused_and_never_left_random(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", skip="blk.1.ffn_up.weight")
    with pytest.raises(ValueError, match=r"missing_keys.*layers\.1\.mlp\.up_proj"):
        convert(path, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_file_that_is_no_gguf_is_named(tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"GIF89a" * 100)
    with pytest.raises(ValueError, match=r"cannot read bad\.gguf"):
        convert(tmp_path / "bad.gguf", tmp_path / "model")


def test_conversion_is_silent_and_leaves_the_libraries_and_the_generator_as_they_were(tmp_path, capfd):
    import gguf
    from transformers.utils import logging

    path = write_gguf(tmp_path / "tiny.gguf")
    before = (gguf.GGUFReader, gguf.get_tensor_name_map, logging.get_verbosity(), logging.is_progress_bar_enabled())
    torch.manual_seed(5)
    state = torch.get_rng_state()
    capfd.readouterr()
    convert(path, tmp_path / "model")
    assert capfd.readouterr() == ("", "")
    assert before == (
        gguf.GGUFReader,
        gguf.get_tensor_name_map,
        logging.get_verbosity(),
        logging.is_progress_bar_enabled(),
    )
    assert torch.equal(state, torch.get_rng_state())
