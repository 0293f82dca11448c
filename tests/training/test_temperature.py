"""The sampling temperature is on every side: trainer, reference, teacher and entropy look at what was drawn from."""

import pytest
import torch
from tiny import save_tiny, tiny_tokenizer
from training_cases import make_config, make_shard, worker_for
from transformers import AutoModelForCausalLM

from limes.models.policy import make_policy

SMALL = {"batch_size": 2, "n_samples_per_prompt": 3, "num_rollout": 10, "max_response_len": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("temperature") / "model", num_layers=1, hidden_size=16))


def model_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


@torch.no_grad()
def record_as_an_engine(shard, folder, temperature):
    """Give each sample the log-probs of softmax(logits / temperature); returns the mean entropy of trained tokens."""
    model = model_of(folder)
    entropies = []
    for sample in shard.samples:
        logits = model(torch.tensor([sample.tokens]), use_cache=False).logits[0] / temperature
        rows = logits.log_softmax(-1)[sample.prompt_length - 1 : -1]
        drawn = torch.tensor(sample.tokens[sample.prompt_length :])
        sample.rollout_log_probs = rows.gather(-1, drawn[:, None])[:, 0].tolist()
        entropy = (rows.exp() * -rows).sum(-1).tolist()
        entropies += [h for h, m in zip(entropy, sample.loss_mask, strict=True) if m]
    return sum(entropies) / len(entropies)


@pytest.mark.parametrize("temperature", [0.5, 0.6, 1.0, 2.0])
def test_u38_u39_u40_trainer_reference_teacher_and_entropy_are_at_the_sampling_temperature(folder, temperature):
    policy = make_policy(model_of(folder), tiny_tokenizer())
    config = make_config(
        rollout=SMALL | {"temperature": temperature},
        model={"ref_path": folder},
        teacher={"path": folder},
        algorithm={"use_rollout_log_probs": True},
    )
    shard = make_shard(policy, config, seed=2)
    entropy = record_as_an_engine(shard, folder, temperature)
    metrics = worker_for(policy, config).train(0, shard)
    assert metrics["train/ratio"] == pytest.approx(1, abs=1e-6)
    assert metrics["train/ratio_max"] == pytest.approx(1, abs=1e-6)
    assert metrics["train/logprob_abs_diff_max"] < 1e-6
    assert metrics["train/ess"] == pytest.approx(1, abs=1e-6)
    assert metrics["train/entropy"] == pytest.approx(entropy, abs=1e-10)
    for name in ("ref_kl", "ref_kl_k3", "teacher_kl"):
        assert metrics[f"train/{name}"] == pytest.approx(0, abs=1e-6), name


def test_temperature_on_one_side_is_seen(folder):
    policy = make_policy(model_of(folder), tiny_tokenizer())
    config = make_config(rollout=SMALL, algorithm={"use_rollout_log_probs": True})
    shard = make_shard(policy, config, seed=2)
    record_as_an_engine(shard, folder, 0.6)
    metrics = worker_for(policy, config).train(0, shard)
    assert metrics["train/ratio_max"] > 1.1
    assert metrics["train/logprob_abs_diff"] > 0.1
