import copy
import json

import pytest
import torch
from tiny import save_tiny, tiny_model, tiny_tokenizer
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoConfig,
    LlamaConfig,
    MistralConfig,
    NemotronConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)

from limes.config.model import ModelConfig
from limes.models.load import load_policy, make_checked_policy, refuse_unsupported
from limes.models.policy import make_policy

SMALL = {
    "vocab_size": 102,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL_GPT2 = {"vocab_size": 102, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 64}
SMALL_GPT_NEO = {
    "vocab_size": 102,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global"], 2]],
    "max_position_embeddings": 64,
}


def random_model(config, dtype=torch.float32):
    """Every parameter is random, so that each has a say in the output."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def checked(config, **options):
    return make_checked_policy(random_model(config, **options), tiny_tokenizer(), None, "some/model")


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL),
        Qwen2Config(**SMALL),
        Qwen3Config(**SMALL, head_dim=16),
        MistralConfig(**SMALL, sliding_window=16),
        GPT2Config(**SMALL_GPT2),
    ],
    ids=lambda config: config.model_type,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_say_the_same_when_packed_are_served(config, dtype):
    policy = checked(config, dtype=dtype)
    assert policy.vocab_size == 102
    assert policy.dtype == dtype


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PhiConfig(**SMALL), "its LM head has a bias"),
        (GPTJConfig(**SMALL_GPT2, rotary_dim=4), "its LM head has a bias"),
        (GPTNeoConfig(**SMALL_GPT_NEO), "its 2 layers attend by themselves"),
        (NemotronConfig(**SMALL), "no attention_plan reaches its attention"),
        (CohereConfig(**SMALL), "differs from the model's own by 0"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_models_that_would_say_something_else_are_refused(config, message):
    with pytest.raises(ValueError, match=f"some/model: {config.model_type} failed its check.*{message}.*Llama"):
        checked(config)


def test_keys_and_values_of_other_shapes_than_the_cache_holds_are_refused():
    model = random_model(LlamaConfig(**SMALL))
    model.config.num_key_value_heads = 4
    with pytest.raises(ValueError, match=r"its keys and values are \[\(2, 8\)\], not \(4, 8\) alone"):
        make_checked_policy(model, tiny_tokenizer(), None, "some/model")


def test_weights_that_are_not_finite_are_refused():
    model = random_model(LlamaConfig(**SMALL))
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="differs from the model's own by nan"):
        make_checked_policy(model, tiny_tokenizer(), None, "some/model")


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (CohereConfig(**SMALL), "scaled logits \\(logit_scale\\)"),
        (LlamaConfig(**SMALL, attention_dropout=0.1), "attention dropout"),
    ],
)
def test_properties_that_are_not_served_are_refused_by_name(config, what):
    with pytest.raises(ValueError, match=f"some/model: {config.model_type} has {what}"):
        refuse_unsupported(config, "some/model")


def test_context_is_bounded_by_what_every_layer_sees():
    assert checked(LlamaConfig(**SMALL)).max_context_len == 64
    assert checked(MistralConfig(**SMALL, sliding_window=16)).max_context_len == 16
    assert checked(MistralConfig(**SMALL, sliding_window=None)).max_context_len == 64
    assert checked(Qwen2Config(**SMALL, use_sliding_window=False, sliding_window=16)).max_context_len == 64


def test_context_ends_where_positions_would_depend_on_company():
    """A longrope model turns to other frequencies for all sequences as soon as one of them is long."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 32,
    }
    config = Phi3Config(**SMALL, rope_parameters=rope, original_max_position_embeddings=32)
    assert checked(config).max_context_len == 32


def test_end_tokens_come_from_tokenizer_config_and_generation_config(tmp_path):
    folder = save_tiny(tmp_path)
    assert load_policy(ModelConfig(path=str(folder))).end_token_ids == (2,)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [2, 4]}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2000], "temperature": 0.1}))
    assert load_policy(ModelConfig(path=str(folder))).end_token_ids == (2, 4, 5)


def test_loading_a_folder_keeps_the_weights(tmp_path):
    model = tiny_model(tied=False)
    policy = load_policy(ModelConfig(path=str(save_tiny(tmp_path, tied=False))))
    for a, b in zip(model.parameters(), policy.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert policy.folder == tmp_path
    assert not policy.model.training


def test_key_shape_of_families():
    assert make_policy(tiny_model(num_heads=4, num_kv_heads=2), tiny_tokenizer()).kv_shape == (2, 8)
    assert checked(GPT2Config(**SMALL_GPT2)).kv_shape == (4, 8)
    assert checked(Qwen3Config(**SMALL, head_dim=16)).kv_shape == (2, 16)
