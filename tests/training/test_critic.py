"""The critic: values, returns and steps, cut invariance and mask silence, and proof that these proofs bite."""

import math
from dataclasses import replace

import pytest
import torch
from critic_cases import critic_for, critic_parameters, exact_critic, ppo_config
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model
from training_cases import exact_policy, make_shard, parameters_after, shard_of, worker_for

import limes.training.critic as critic_module
from limes.algorithms.whitening import measure
from limes.records import Sample
from limes.training.critic import ValueMetrics, ValueTargets, value_backward
from limes.training.ranks import Ranks
from limes.training.values import PackedValues

NAN = float("nan")


def padded_values(samples: list[Sample], model) -> list[list[float]]:
    """Values from a padded batch through the stock attention: those of the text before each response token."""
    plain = tiny_model(dtype=torch.float64).model
    longest = max(len(s.tokens) for s in samples)
    ids = torch.tensor([s.tokens + [0] * (longest - len(s.tokens)) for s in samples])
    attended = torch.tensor([[1] * len(s.tokens) + [0] * (longest - len(s.tokens)) for s in samples])
    with torch.no_grad():
        hidden = plain(input_ids=ids, attention_mask=attended).last_hidden_state
        values = (hidden @ model.head.weight.T + model.head.bias).squeeze(-1)
    return [row[s.prompt_length - 1 : len(s.tokens) - 1].tolist() for row, s in zip(values, samples, strict=True)]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("max_tokens", [20, 10_000])
def test_values_equal_those_of_a_padded_batch(share: bool, max_tokens: int) -> None:
    config = ppo_config(trainer={"share_prefixes": share, "max_tokens_per_micro_batch": max_tokens})
    shard = make_shard(exact_policy(), config)
    worker = critic_for(config)
    expected = padded_values(shard.samples, worker.model)
    values = worker.train(0, shard)["values"]
    assert [len(row) for row in values] == [s.response_length for s in shard.samples]
    for ours, theirs in zip(values, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-12)
    assert len({round(v, 6) for row in values for v in row}) > 20


def test_values_do_not_know_the_sampling_temperature() -> None:
    """U35."""
    shard = make_shard(exact_policy(), ppo_config())
    found = [critic_for(ppo_config(rollout={"temperature": t})).train(0, shard)["values"] for t in (0.5, 1.0)]
    assert found[0] == found[1]


def test_values_are_those_before_the_critics_own_step() -> None:
    config = ppo_config()
    shard = make_shard(exact_policy(), config)
    worker = critic_for(config)
    first, second = worker.train(0, shard)["values"], worker.train(1, shard)["values"]
    assert first == critic_for(config).train(0, shard)["values"]
    assert first != second


def gae_returns(sample: Sample, values: list[float], gamma: float, lambd: float, kl: list[float], kl_coef: float):
    """Returns of the trained tokens alone, by the recursion."""
    kept = [i for i, m in enumerate(sample.loss_mask) if m]
    rewards = [-kl_coef * kl[i] for i in kept]
    rewards[-1] += sample.reward
    advantage, following, returns = 0.0, 0.0, {}
    for i, reward in zip(reversed(kept), reversed(rewards), strict=True):
        advantage = reward + gamma * following - values[i] + gamma * lambd * advantage
        following = values[i]
        returns[i] = advantage + values[i]
    return returns


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_returns_walk_over_trained_tokens_alone_and_have_the_kl_in_them(kl_coef: float) -> None:
    """U30: tool tokens neither discount nor bootstrap; what stands under the mask of values and KL is never read."""
    config = ppo_config(algorithm={"gamma": 0.9, "lambd": 0.8, "kl_coef": kl_coef})
    shard = make_shard(exact_policy(), config)
    kl = [[0.1 * math.sin(s.index + i) if m else NAN for i, m in enumerate(s.loss_mask)] for s in shard.samples]
    worker = critic_for(config)
    targets = worker._targets(shard, kl if kl_coef else None)
    for row, sample in enumerate(shard.samples):
        old_values = targets.old_values[row].tolist()
        expected = gae_returns(sample, old_values, 0.9, 0.8, kl[row], kl_coef)
        for i, mask in enumerate(sample.loss_mask):
            assert targets.returns[row][i].item() == pytest.approx(expected[i] if mask else 0.0, abs=1e-12)


# Cut invariance


def targets_of(worker, shard, seed: int = 0) -> ValueTargets:
    """Targets with old values away from the current ones, on both sides of the clip."""
    targets = worker._targets(shard, None)
    draw = torch.Generator().manual_seed(seed)
    moved = [v + 0.4 * torch.randn(len(v), generator=draw, dtype=v.dtype) for v in targets.old_values]
    return replace(targets, old_values=moved)


def gradient_of(worker, targets: ValueTargets, cut: list[list[int]], config) -> tuple[torch.Tensor, dict[str, float]]:
    """Gradient and metrics of one optimizer step."""
    metrics = ValueMetrics(targets)
    total = float(sum(int(mask.sum()) for mask in targets.masks))
    for indices in cut:
        value_backward(worker._forward, targets, indices, total, config, metrics)
    gradient = torch.cat([p.grad.flatten() for _, p in worker.model.named_parameters()])
    for _, parameter in worker.model.named_parameters():
        parameter.grad = None
    metrics.stepped(0.0, 1.0)
    return gradient, metrics.summary(1.0, Ranks.alone())


@pytest.mark.parametrize("value_clip", [0.2, None])
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_cut_invariance(value_clip: float | None, data: st.DataObject) -> None:
    """P1."""
    config = ppo_config(critic={"value_clip": value_clip}, algorithm={"lambd": 0.9})
    shard = make_shard(exact_policy(), config, seed=data.draw(st.integers(0, 99)))
    worker = critic_for(config)
    targets = targets_of(worker, shard)
    order = data.draw(st.permutations(range(len(shard.samples))))
    bounds = sorted(data.draw(st.sets(st.integers(1, len(order) - 1), max_size=5)))
    cut = [order[a:b] for a, b in zip([0, *bounds], [*bounds, len(order)], strict=True)]
    gradient, whole = gradient_of(worker, targets, [list(range(len(order)))], config)
    worker._forward = PackedValues(worker.model, share_prefixes=data.draw(st.booleans()))
    gradient_of_parts, parts = gradient_of(worker, targets, cut, config)
    torch.testing.assert_close(gradient_of_parts, gradient, rtol=0, atol=1e-10)
    assert parts.keys() == whole.keys()
    for name in whole:
        assert parts[name] == pytest.approx(whole[name], abs=1e-10), name
    assert ("train/value_clipfrac" in whole) == (value_clip is not None)


def test_cut_invariance_bites(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean over each micro-batch is seen."""
    config = ppo_config()
    worker, shard = critic_for(config), make_shard(exact_policy(), config)
    targets = targets_of(worker, shard)
    gradient, _ = gradient_of(worker, targets, [list(range(12))], config)
    own = critic_module.aggregate
    monkeypatch.setattr(critic_module, "aggregate", lambda *a, **options: own(*a, **(options | {"total": None})))
    faulty, _ = gradient_of(worker, targets, [[0, 1, 2], list(range(3, 12))], config)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(faulty, gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_whole_step_does_not_depend_on_the_micro_batches(num_steps: int) -> None:
    ends = []
    for limit in (10_000, 17):
        config = ppo_config(trainer={"max_tokens_per_micro_batch": limit, "num_steps_per_rollout": num_steps})
        worker = critic_for(config)
        worker.train(0, make_shard(exact_policy(), config))
        assert worker.num_steps_done == num_steps
        ends.append(critic_parameters(worker))
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=1e-7)  # Adam divides rounding by tiny gradients


@settings(max_examples=4, deadline=None)
@given(ranks=st.integers(2, 4), seed=st.integers(0, 99))
def test_shards_of_a_rollout_add_up(ranks: int, seed: int) -> None:
    config = ppo_config()
    shard = make_shard(exact_policy(), config, seed)
    worker = critic_for(config)
    whole, _ = gradient_of(worker, worker._targets(shard, None), [list(range(12))], config)
    trained, total = sum(shard.num_trained_tokens), torch.zeros(())
    for rank in range(ranks):
        partition = list(range(rank, 12, ranks))
        own = replace(shard, samples=[shard.samples[i] for i in partition], partition=partition)
        targets = worker._targets(own, None)
        gradient, _ = gradient_of(worker, targets, [list(range(len(partition)))], config)
        total = total + gradient * sum(int(m.sum()) for m in targets.masks) / trained
    torch.testing.assert_close(total, whole, rtol=0, atol=1e-10)


# Mask silence


def poisoned(values: list[list[float]], shard, poison: float) -> list[list[float]]:
    """The same values with `poison` under every mask."""
    return [
        [v if m else poison for v, m in zip(row, s.loss_mask, strict=True)]
        for row, s in zip(values, shard.samples, strict=True)
    ]


@pytest.mark.parametrize("poison", [NAN, float("inf"), 1e9])
def test_mask_silence_of_the_critic(poison: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """P2, U29: values under the mask, as the critic finds them, reach neither returns nor gradient nor metrics."""
    config = ppo_config(algorithm={"gamma": 0.9, "lambd": 0.8})
    shard = make_shard(exact_policy(), config)
    hidden = torch.tensor([m for s in shard.samples for m in s.loss_mask]) == 0
    assert hidden.any()
    clean = critic_for(config)
    clean.train(0, shard)
    dirty = critic_for(config)
    own = dirty._forward.score
    monkeypatch.setattr(dirty._forward, "score", lambda *args: own(*args).masked_fill(hidden, poison))
    dirty.train(0, shard)
    assert torch.equal(critic_parameters(clean), critic_parameters(dirty))
    a, b = ({k: v for k, v in w.report().items() if not k.startswith("perf/")} for w in (clean, dirty))
    assert a == b


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("poison", [NAN, 1e9])
def test_mask_silence_of_values_on_their_way_to_the_actor(poison: float, whiten: bool) -> None:
    """P2, U26, U29: the whole path, whitening included."""
    config = ppo_config(algorithm={"gamma": 0.9, "lambd": 0.8, "normalize_advantages": whiten})
    policy, other = exact_policy(), exact_policy()
    shard = make_shard(policy, config)
    values = critic_for(config).train(0, shard)["values"]
    first = worker_for(policy, config).train(0, shard, {"values": values})
    second = worker_for(other, config).train(0, shard, {"values": poisoned(values, shard, poison)})
    assert torch.equal(parameters_after(policy), parameters_after(other))
    assert first["train/loss"] == second["train/loss"]
    assert not torch.equal(parameters_after(policy), parameters_after(exact_policy()))


def test_mask_silence_bites(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that hides nothing lets what stands under it through."""
    config = ppo_config(algorithm={"lambd": 0.8})
    shard = make_shard(exact_policy(), config)
    worker = critic_for(config)
    hidden = torch.tensor([m for s in shard.samples for m in s.loss_mask]) == 0
    own = worker._forward.score
    monkeypatch.setattr(worker._forward, "score", lambda *args: own(*args).masked_fill(hidden, 1e9))
    for sample in shard.samples:
        sample.loss_mask = [1] * sample.response_length
    before = critic_for(config)
    before.train(0, shard)
    worker.train(0, shard)
    assert not torch.equal(critic_parameters(worker), critic_parameters(before))


def test_samples_outside_training_teach_the_critic_nothing() -> None:
    config = ppo_config()
    shard = make_shard(exact_policy(), config)
    worker, other = critic_for(config), critic_for(config)
    out = replace(
        shard,
        rewards=[None, *shard.rewards[1:]],
        num_trained_tokens=[0, *shard.num_trained_tokens[1:]],
    )
    without = replace(out, samples=shard.samples[1:], partition=shard.partition[1:])
    worker.train(0, out)
    other.train(0, without)
    torch.testing.assert_close(critic_parameters(worker), critic_parameters(other), rtol=0, atol=1e-9)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_tokens_without_an_engine_log_prob_are_none_of_the_critics(num_steps: int) -> None:
    """The actor leaves them out, so GAE walks over the same tokens here, and they are in no denominator."""
    config = ppo_config(trainer={"num_steps_per_rollout": num_steps})
    missing, masked = (make_shard(exact_policy(), config) for _ in range(2))
    num = 0
    for holed, cut in zip(missing.samples, masked.samples, strict=True):
        trained = [i for i, marked in enumerate(cut.loss_mask) if marked]
        if len(trained) > 1:
            holed.rollout_log_probs[trained[0]], cut.loss_mask[trained[0]] = NAN, 0
            num += 1
    worker, other = critic_for(config), critic_for(config)
    assert worker.train(0, missing) == other.train(0, shard_of(masked.samples))
    assert num > 2
    torch.testing.assert_close(critic_parameters(worker), critic_parameters(other), rtol=0, atol=1e-12)


# Learning


def test_ppo_on_one_rollout_learns_to_foresee_it() -> None:
    """Actor and critic together; the rollout stays the same, and so do its returns with lambda 1."""
    config = ppo_config(trainer={"lr": 1e-3}, rollout={"num_rollout": 40}, critic={"value_clip": None, "lr": 3e-3})
    policy = exact_policy()
    shard = make_shard(policy, config)
    critic, actor = critic_for(config, head=0.0), worker_for(policy, config)
    reports, losses = [], []
    for rollout_id in range(40):
        values = critic.train(rollout_id, shard)
        reports.append(critic.report())
        losses.append(actor.train(rollout_id, shard, values)["train/loss"])
    explained = [report["train/explained_variance"] for report in reports]
    assert explained[0] == pytest.approx(0.0, abs=1e-12)  # a new head says 0 for everything
    assert explained[-1] > 0.8
    assert reports[-1]["train/value_loss"] < 0.2 * reports[0]["train/value_loss"]
    assert all(math.isfinite(loss) for loss in losses)


def test_the_value_clip_holds_values_near_where_they_were() -> None:
    """After the first of several steps a value that has moved further than the clip stops learning."""
    config = ppo_config(trainer={"num_steps_per_rollout": 4}, critic={"value_clip": 1e-3, "lr": 0.05})
    worker = critic_for(config)
    worker.train(0, make_shard(exact_policy(), config))
    assert worker.report()["train/value_clipfrac"] > 0.1


def test_it_has_its_own_schedule_and_clipping_and_reports_them() -> None:
    config = ppo_config(
        trainer={"lr": 1e-4, "lr_schedule": "constant", "clip_grad": 1.0},
        critic={"lr": 4e-3, "lr_schedule": "linear", "lr_warmup_steps": 2, "min_lr": 1e-3, "clip_grad": 1e-3},
        rollout={"num_rollout": 5},
    )
    worker = critic_for(config)
    shard = make_shard(exact_policy(), config)
    rates = []
    for rollout_id in range(5):
        worker.train(rollout_id, shard)
        rates.append(worker.report()["train/critic_lr"])
        assert worker.report()["train/critic_grad_norm"] > 1e-3
    assert rates == pytest.approx([2e-3, 4e-3, 4e-3, 2.5e-3, 1e-3])


def test_a_gradient_that_is_not_finite_moves_nothing_and_is_counted() -> None:
    config = ppo_config()
    worker = critic_for(config)
    with torch.no_grad():
        worker.model.backbone.norm.weight[0] = NAN
    before = critic_parameters(worker)
    worker.train(0, make_shard(exact_policy(), config))
    assert worker.report()["train/critic_nonfinite_grads"] == 1
    assert torch.equal(critic_parameters(worker).nan_to_num(7), before.nan_to_num(7))
    assert worker.num_steps_done == 0


def test_a_rollout_of_which_nothing_trains_gives_no_values_and_moves_nothing() -> None:
    config = ppo_config()
    worker = critic_for(config)
    before = critic_parameters(worker)
    shard = make_shard(exact_policy(), config)
    nothing = replace(shard, samples=[], partition=[], rewards=[None] * 12, num_trained_tokens=[0] * 12)
    assert worker.train(0, nothing) == {"values": []}
    assert torch.equal(critic_parameters(worker), before)
    assert "train/value_loss" not in worker.report()


def test_explained_variance_of_equal_returns_is_left_out() -> None:
    config = ppo_config()
    shard = make_shard(exact_policy(), config)
    for sample in shard.samples:
        sample.reward = 1.0
    worker = critic_for(config)
    worker.train(0, shard_of(shard.samples))
    assert "train/explained_variance" not in worker.report()


def test_explained_variance_is_that_of_its_definition() -> None:
    values, returns = torch.randn(50, dtype=torch.float64), torch.randn(50, dtype=torch.float64)
    mask = (torch.rand(50) < 0.7).long()
    kept = mask != 0
    expected = 1 - (returns - values)[kept].var() / returns[kept].var()
    found = critic_module.value_loss.explained_variance(measure(returns - values, mask), measure(returns, mask))
    assert found == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_checkpoint_goes_on_to_the_same_bits(tmp_path, dtype: torch.dtype) -> None:
    config = ppo_config(
        trainer={"weight_decay": 0.1, "gradient_checkpointing": True},
        critic={"lr_schedule": "cosine", "lr_warmup_steps": 2},
    )
    straight = critic_for(config, dtype=dtype)
    policy = exact_policy()
    shards = [make_shard(policy, config, seed) for seed in range(4)]
    for i in range(4):
        if i == 2:
            straight.save_model(1, tmp_path)
        values = straight.train(i, shards[i])
    resumed = critic_for(config, seed=1, dtype=dtype)
    resumed.load(tmp_path)
    assert resumed.num_steps_done == 2
    again = [resumed.train(i, shards[i]) for i in (2, 3)][-1]
    assert again == values
    assert torch.equal(critic_parameters(straight), critic_parameters(resumed))
    assert [path.name for path in tmp_path.iterdir()] == ["critic"]


def test_what_is_no_checkpoint_of_a_critic_is_refused(tmp_path) -> None:
    config = ppo_config()
    with pytest.raises(ValueError, match=r"checkpoint\.load = .*critic: not a checkpoint, it lacks model"):
        critic_for(config).load(tmp_path)


def test_the_sharing_of_prefixes_changes_no_gradient() -> None:
    config = ppo_config()
    shard = make_shard(exact_policy(), config)
    found = []
    for share in (True, False):
        model = exact_critic()
        (PackedValues(model, share_prefixes=share)(shard.samples) ** 2).sum().backward()
        found.append(torch.cat([p.grad.flatten() for _, p in model.named_parameters()]))
    torch.testing.assert_close(*found, rtol=0, atol=1e-10)
