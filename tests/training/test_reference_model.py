"""The reference of the KL: where it comes from, what it weighs, and when it moves."""

import copy

import pytest
import torch
from tiny import save_tiny, tiny_model, tiny_tokenizer
from training_cases import exact_policy, make_config, make_shard, parameters_after, shard_of, worker_for

from limes.algorithms.estimators import estimate
from limes.models.policy import make_policy
from limes.training.forward import PackedForward

IN_LOSS = {"kl_loss_coef": 0.1}


def small_policy(seed=0):
    return exact_policy(seed, num_layers=1, hidden_size=16)


def equal_rewards(shard):
    for sample in shard.samples:
        sample.reward = 0.5
    return shard_of(shard.samples)


@pytest.mark.parametrize("kind", ["k2", "k3", "low_var_kl"])
def test_the_kl_is_0_at_the_start_and_no_copy_is_made_before_the_first_step(kind):
    policy, config = small_policy(), make_config(algorithm=IN_LOSS | {"kl_loss_type": kind})
    worker = worker_for(policy, config)
    shard = make_shard(policy, config)
    assert worker._reference.is_actor
    assert torch.equal(worker._reference.score(shard.samples), worker._forward.score(shard.samples, 10_000))
    assert worker._reference.is_actor
    metrics = worker.train(0, shard)
    for name in ("ref_kl", "ref_kl_k3", "kl_loss"):  # passes with and without gradients may round apart
        assert abs(metrics[f"train/{name}"]) < 1e-14
    assert not worker._reference.is_actor
    assert worker.train(1, shard)["train/ref_kl_k3"] > 0


def test_the_reference_is_the_start_and_gets_no_gradient():
    policy, config = small_policy(), make_config(algorithm=IN_LOSS)
    start = small_policy()
    worker = worker_for(policy, config)
    shard = make_shard(policy, config)
    worker.train(0, shard)
    worker.train(1, shard)
    own = worker._reference._own
    assert torch.equal(parameters_after(own), parameters_after(start))
    assert not torch.equal(parameters_after(policy), parameters_after(start))
    assert all(p.grad is None and not p.requires_grad for p in own.model.parameters())
    assert own.model.get_input_embeddings().weight is own.head_weight  # the tie was copied, not cut


@pytest.mark.parametrize(("kind", "slope"), [("k2", lambda d: d), ("k3", lambda d: 1 - (-d).exp())])
def test_the_kl_in_the_loss_has_the_gradient_of_its_formula(kind, slope):
    """With equal rewards only the KL pulls: its gradient is that of sum slope(log p - log ref) * log p / tokens."""
    policy, other = small_policy(), small_policy(seed=1)
    trainer = {"clip_grad": 0.0, "lr": 1e-30}
    config = make_config(algorithm=IN_LOSS | {"kl_loss_type": kind}, trainer=trainer)
    shard = equal_rewards(make_shard(policy, config))
    worker = worker_for(policy, config)
    worker._reference._own = other
    norm = worker.train(0, shard)["train/grad_norm"]
    forward = PackedForward(policy, temperature=1.0, head_chunk=100)
    ref = PackedForward(other, temperature=1.0, head_chunk=100).score(shard.samples, 10_000)
    log_probs = forward(shard.samples).log_probs
    mask = torch.tensor([m for s in shard.samples for m in s.loss_mask])
    weight = slope((log_probs - ref).detach())
    (0.1 * weight * log_probs * mask).sum().div(mask.sum()).backward()
    expected = torch.cat([p.grad.flatten() for p in policy.model.parameters()]).norm()
    assert norm == pytest.approx(float(expected), rel=1e-9)
    assert norm > 1e-3


def test_equal_rewards_and_a_kl_in_the_loss_pull_back_to_the_reference():
    policy = small_policy()
    config = make_config(algorithm={"kl_loss_coef": 1.0}, trainer={"lr": 1e-3})
    shard = make_shard(policy, config)
    worker = worker_for(policy, config)
    for rollout_id in range(3):
        worker.train(rollout_id, shard)
    shard = equal_rewards(shard)
    found = [worker.train(rollout_id, shard)["train/ref_kl_k3"] for rollout_id in range(3, 15)]
    assert found[-1] < 0.5 * found[0]


def test_the_kl_in_the_reward_reaches_the_advantages_and_nothing_under_the_mask_does(monkeypatch):
    """A_t = R - kl_coef * sum of the KL from t on, by hand, before whitening."""
    config = make_config(algorithm={"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.3})
    policy, other = small_policy(), small_policy(seed=1)
    shard = make_shard(policy, config)
    worker = worker_for(policy, config)
    worker._reference._own = other
    seen = {}

    def unwhitened(estimator, inputs, settings, **options):
        seen["raw"], _ = estimator.estimate(inputs, settings)
        return estimate(estimator, inputs, settings, **options)

    monkeypatch.setattr("limes.training.batch.estimate", unwhitened)
    kl = worker.compute_kl(0, shard)["kl"]
    worker.train(0, shard)
    raw = seen["raw"].split([s.response_length for s in shard.samples])
    for sample, values, penalties in zip(shard.samples, raw, kl, strict=True):
        for t, mask in enumerate(sample.loss_mask):
            rest = sum(k * m for k, m in zip(penalties[t:], sample.loss_mask[t:], strict=True))
            assert float(values[t]) == pytest.approx(mask * (sample.reward - 0.3 * rest), abs=1e-9)
    assert sum(abs(k) for row in kl for k in row) > 1


def test_the_kl_of_the_reward_is_scored_once_a_rollout(monkeypatch):
    config = make_config(algorithm={"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.3})
    policy = small_policy()
    shard = make_shard(policy, config)
    worker = worker_for(policy, config)
    calls = []
    own = PackedForward.score
    monkeypatch.setattr(PackedForward, "score", lambda *args: calls.append(1) or own(*args))
    worker.compute_kl(0, shard)
    worker.train(0, shard)
    assert len(calls) == 1  # the actor is still the reference
    worker.compute_kl(1, shard)
    worker.train(1, shard)
    assert len(calls) == 3


def test_the_reference_is_refreshed_on_its_interval():
    policy = small_policy()
    config = make_config(algorithm=IN_LOSS | {"ref_update_interval": 2})
    worker = worker_for(policy, config)
    shard = make_shard(policy, config)
    distances = []
    for rollout_id in range(5):
        worker.train(rollout_id, shard)
        distances.append(
            float((worker._reference.score(shard.samples) - worker._forward.score(shard.samples, 99)).norm())
        )
    assert [d < 1e-12 for d in distances] == [False, True, False, True, False]


def test_a_checkpoint_keeps_a_refreshed_reference_and_the_start_of_one_that_is_not(tmp_path):
    for interval in (None, 2):
        config = make_config(algorithm=IN_LOSS | ({"ref_update_interval": interval} if interval else {}))

        def fresh(config=config):
            policy = make_policy(tiny_model(num_layers=1, hidden_size=16), tiny_tokenizer())
            return policy, worker_for(policy, config)

        straight, worker = fresh()
        shards = [make_shard(straight, config, seed) for seed in range(5)]
        folder = tmp_path / str(interval)
        for i in range(5):
            if i == 3:
                worker.save_model(2, folder)
            worker.train(i, shards[i])
        resumed, second = fresh()
        second.load(folder)
        for i in (3, 4):
            second.train(i, shards[i])
        assert torch.equal(parameters_after(straight), parameters_after(resumed))
        assert (folder / "reference").exists() == (interval is not None)


def test_a_reference_of_its_own_is_loaded_and_measured_without_a_weight(tmp_path):
    path = save_tiny(tmp_path / "ref", num_layers=1, hidden_size=16, seed=5)
    policy = small_policy()
    measured = make_config(model={"ref_path": str(path)})
    shard = make_shard(policy, measured)
    metrics = worker_for(copy.deepcopy(policy), measured).train(0, shard)
    assert metrics["train/ref_kl_k3"] > 0
    plain = worker_for(policy, make_config()).train(0, shard)
    assert plain["train/grad_norm"] == metrics["train/grad_norm"]
    with pytest.raises(ValueError, match=r"model.ref_path = .*nothing"):
        worker_for(policy, make_config(model={"ref_path": str(tmp_path / "nothing")}))


def test_a_reference_of_another_vocabulary_is_refused(tmp_path):
    path = save_tiny(tmp_path / "ref", num_layers=1, hidden_size=16)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["new"])
    tokenizer.save_pretrained(path)
    with pytest.raises(ValueError, match=r"model.ref_path = .*different vocabularies"):
        worker_for(small_policy(), make_config(model={"ref_path": str(path)}))


def test_a_teacher_pulls_towards_itself_beside_any_estimator(tmp_path):
    path = save_tiny(tmp_path / "teacher", num_layers=1, hidden_size=16, seed=5)
    config = make_config(teacher={"path": str(path), "opd_coef": 0.5}, trainer={"lr": 1e-3})
    policy = small_policy()
    shard = equal_rewards(make_shard(policy, config))
    worker = worker_for(policy, config)
    teacher = worker._scorer._teacher.score(shard.samples, 10_000)
    seen = []
    make = worker._make_batch
    worker._make_batch = lambda *args: seen.append(make(*args)) or seen[-1]
    found = [worker.train(i, shard)["train/teacher_kl"] for i in range(10)]
    batch = seen[0]
    expected = torch.where(batch.mask != 0, 0.5 * (teacher - batch.old_log_probs), 0.0)
    torch.testing.assert_close(batch.advantages.double(), expected.double(), rtol=0, atol=1e-6)
    assert found[-1] < found[0]
    with pytest.raises(ValueError, match=r"teacher.opd_coef = 0.5 has no effect without a teacher"):
        make_config(teacher={"opd_coef": 0.5})
