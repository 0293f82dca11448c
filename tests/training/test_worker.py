import asyncio
import math

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer
from training_cases import exact_policy, make_config, make_shard, parameters_after, shard_of, worker_for
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, LlamaForCausalLM, OPTConfig

from limes.models.policy import enable_checkpointing, make_policy
from limes.run import read_train_records
from limes.training.forward import PackedForward


def test_equal_rewards_move_nothing_momentum_included():
    config = make_config()
    policy = exact_policy()
    worker = worker_for(policy, config)
    worker.train(0, make_shard(policy, config))  # leaves momentum behind
    before = parameters_after(policy)
    shard = make_shard(policy, config, seed=1)
    for sample in shard.samples:
        sample.reward = 0.7
    metrics = worker.train(1, shard_of(shard.samples))
    assert metrics["train/skipped"] == 1
    assert torch.equal(parameters_after(policy), before)


def test_a_step_moves_towards_better_answers():
    config = make_config(trainer={"lr": 1e-3})
    policy = exact_policy()
    shard = make_shard(policy, config, tool_tokens=False)
    worker = worker_for(policy, config)
    first = worker.train(0, shard)
    second = worker.train(1, shard)
    assert first["train/ppo_kl"] == 0  # on policy: the ratio is exactly 1
    assert first["train/ratio_max"] == 1
    assert second["train/logprob_abs_diff"] > first["train/logprob_abs_diff"]
    advantages = [r - sum(shard.rewards[4 * (i // 4) : 4 * (i // 4) + 4]) / 4 for i, r in enumerate(shard.rewards)]
    gain = sum(
        a * (sum(worker_log_probs(worker, sample)) - sum(sample.rollout_log_probs))
        for a, sample in zip(advantages, shard.samples, strict=True)
    )
    assert gain > 0


def worker_log_probs(worker, sample):
    with torch.no_grad():
        return worker._forward([sample]).log_probs.tolist()


def test_several_steps_a_rollout_use_log_probs_from_before_the_first():
    config = make_config(trainer={"num_steps_per_rollout": 3, "lr": 1e-2})
    policy = exact_policy()
    shard = make_shard(policy, config)
    metrics = worker_for(policy, config).train(0, shard)
    assert metrics["train/ratio_max"] > 1  # the later steps are off policy
    assert metrics["train/logprob_abs_diff"] > 0


def test_logged_loss_is_the_loss_that_was_optimised():
    config = make_config(algorithm={"entropy_coef": 0.3})
    policy = exact_policy()
    shard = make_shard(policy, config)
    metrics = worker_for(policy, config).train(0, shard)
    expected = metrics["train/pg_loss"] - 0.3 * metrics["train/entropy"]
    assert metrics["train/loss"] == pytest.approx(expected, abs=1e-12)


def test_gradient_norm_is_logged_before_clipping():
    policy, other = exact_policy(), exact_policy()
    tight = make_config(trainer={"clip_grad": 1e-3})
    loose = make_config(trainer={"clip_grad": 0.0})
    shard = make_shard(policy, loose)
    clipped = worker_for(policy, tight).train(0, shard)["train/grad_norm"]
    assert clipped == pytest.approx(worker_for(other, loose).train(0, shard)["train/grad_norm"])
    assert clipped > 1e-3


def test_a_gradient_that_is_not_finite_moves_nothing_and_is_counted():
    config = make_config()
    policy = exact_policy()
    worker = worker_for(policy, config)
    shard = make_shard(policy, config)
    with torch.no_grad():
        policy.model.model.norm.weight[0] = math.nan
    before = parameters_after(policy)
    metrics = worker.train(0, shard)
    assert metrics["train/nonfinite_grads"] == 1
    assert torch.equal(parameters_after(policy).nan_to_num(7), before.nan_to_num(7))
    assert worker.num_steps_done == 0


def test_records_hold_each_trained_token_once(tmp_path):
    config = make_config()
    policy = exact_policy()
    shard = make_shard(policy, config)
    worker_for(policy, config, samples_folder=tmp_path).train(3, shard)
    records = read_train_records(tmp_path, 3)
    assert sorted(records) == [sample.index for sample in shard.samples]
    for sample in shard.samples:
        record = records[sample.index]
        assert len(record.log_probs) == len(record.advantages) == sample.response_length
        for ours, engine, mask in zip(record.log_probs, sample.rollout_log_probs, sample.loss_mask, strict=True):
            assert not mask or ours == pytest.approx(engine, abs=1e-6)


def test_update_weights_tells_the_engine_and_moves_no_tensor():
    config = make_config()
    policy = exact_policy()
    worker = worker_for(policy, config)
    pointers = [p.data_ptr() for p in policy.model.parameters()]
    shard = make_shard(policy, config)
    for rollout_id in range(2):
        worker.train(rollout_id, shard)
        asyncio.run(worker.update_weights())
    assert worker._engine.versions == [1, 2]
    assert pointers == [p.data_ptr() for p in policy.model.parameters()]


def test_gradient_checkpointing_changes_nothing_but_memory():
    ends = []
    for checkpointing in (False, True):
        config = make_config(trainer={"gradient_checkpointing": checkpointing, "lr": 1e-2})
        policy = exact_policy()
        worker = worker_for(policy, config)
        worker.train(0, make_shard(policy, config))
        ends.append(parameters_after(policy))
    assert torch.equal(*ends)


SMALL = {"vocab_size": 102, "max_position_embeddings": 256}
WITH_DROPOUT = [
    GPT2Config(vocab_size=102, n_positions=256, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.5, embd_pdrop=0.5),
    OPTConfig(**SMALL, hidden_size=16, word_embed_proj_dim=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2),
]


@pytest.mark.parametrize("settings", WITH_DROPOUT, ids=lambda settings: settings.model_type)
def test_gradient_checkpointing_recomputes_layers_and_nothing_drops_out(settings):
    """Dropout in modules (GPT-2) and in functions (OPT) alike; attention dropout is refused at loading."""
    torch.manual_seed(0)
    settings.attn_pdrop = settings.attention_dropout = 0.0
    policy = make_policy(AutoModelForCausalLM.from_config(settings), tiny_tokenizer())
    shard = make_shard(policy, make_config())
    forward = PackedForward(policy, temperature=1.0, head_chunk=1024)
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            enable_checkpointing(policy.model)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x.numel()) or x, lambda x: x):
            log_probs = forward(shard.samples).log_probs
        grads = torch.autograd.grad(log_probs.sum(), list(policy.model.parameters()), allow_unused=True)
        found.append((log_probs.detach(), grads, sum(saved)))
    (plain, plain_grads, kept), (recomputed, grads, kept_less) = found
    assert torch.equal(plain, recomputed)
    for one, two in zip(plain_grads, grads, strict=True):
        torch.testing.assert_close(one, two)
    assert kept_less < kept / 2
    assert not policy.model.training


def test_a_model_without_layers_to_recompute_is_refused():
    with pytest.raises(ValueError, match=r"trainer\.gradient_checkpointing = true: llama has no layers"):
        enable_checkpointing(
            LlamaForCausalLM(LlamaConfig(num_hidden_layers=0, num_attention_heads=1, hidden_size=8, vocab_size=8))
        )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_checkpoint_goes_on_to_the_same_bits(tmp_path, tied, dtype):
    config = make_config(trainer={"lr_schedule": "cosine", "lr_warmup_steps": 2, "weight_decay": 0.1})

    def fresh(seed):
        policy = make_policy(tiny_model(seed=seed, tied=tied, dtype=dtype), tiny_tokenizer())
        return policy, worker_for(policy, config)

    straight, worker = fresh(0)
    shards = [make_shard(straight, config, seed) for seed in range(4)]
    for i in range(4):
        if i == 2:
            asyncio.run(worker.update_weights())
            worker.save_model(1, tmp_path)
        worker.train(i, shards[i])
    resumed, second = fresh(1)
    second.load(tmp_path)
    assert second.weight_version == 1
    for i in (2, 3):
        second.train(i, shards[i])
    assert torch.equal(parameters_after(straight), parameters_after(resumed))


def test_a_checkpoint_is_a_model_folder_of_transformers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = make_config()
    policy = make_policy(tiny_model(), tiny_tokenizer())
    worker = worker_for(policy, config)
    worker.train(0, make_shard(policy, config))
    worker.save_model(0, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for (name, a), b in zip(policy.model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b), name
    ids = torch.tensor([[3, 20, 21, 4]])
    assert torch.equal(loaded.get_output_embeddings().weight, policy.head_weight)
    assert loaded(ids).logits.shape[-1] == policy.head_weight.shape[0]
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    config = make_config()
    policy = make_policy(tiny_model(), tiny_tokenizer())
    worker_for(policy, config).save_model(0, tmp_path)
    other = make_policy(tiny_model(num_layers=3), tiny_tokenizer())
    with pytest.raises(ValueError, match="another model"):
        worker_for(other, config).load(tmp_path)
    with pytest.raises(ValueError, match=r"lacks model, optimizer\.safetensors, trainer\.json"):
        worker_for(other, config).load(tmp_path / "empty")
