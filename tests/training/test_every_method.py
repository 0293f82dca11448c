"""All estimators, losses, aggregations and corrections, each with each, as the trainer runs them."""

import copy
import inspect
import random
from functools import partial
from itertools import product
from unittest.mock import patch

import pytest
import torch
from algorithm_cases import (
    CORRECTIONS,
    ESTIMATORS,
    LOSSES,
    OWN,
    add_steps,
    own_advantage,
    settings_of,
    values_for,
)
from training_cases import exact_policy, make_config, make_shard, parameters_after, shard_of, worker_for

from limes.algorithms import corrections, estimators, kl, policy_loss
from limes.algorithms.aggregate import AGGREGATIONS
from limes.config import algorithm as named
from limes.config import algorithm_checks
from limes.training import batch as batch_module
from limes.training.batch import TrainBatch, make_batch, optimizer_steps
from limes.training.estimator import build_estimator
from limes.training.forward import TokenOutputs
from limes.training.objective import REJECTING, Objective

SMALL = {"batch_size": 2, "n_samples_per_prompt": 3, "num_rollout": 10, "max_response_len": 8}


def test_settings_know_the_names_that_the_algorithms_have():
    assert set(named.ESTIMATORS) == set(estimators.ESTIMATORS) == set(ESTIMATORS)
    assert set(named.POLICY_LOSSES) == set(policy_loss.POLICY_LOSSES) == set(LOSSES)
    assert set(named.AGGREGATIONS) == set(AGGREGATIONS)
    assert set(named.KlKind.__args__) == set(kl.KINDS)
    assert set(named.WINDOWS) | {"none"} == set(corrections.CORRECTIONS)
    rows = estimators.ESTIMATORS.items()
    assert {name for name, row in rows if row.kl_in_reward} == set(algorithm_checks.KL_IN_REWARD)
    assert {name for name, row in rows if row.whitens} == set(algorithm_checks.WHITENED)
    assert {"veto" in inspect.signature(corrections.CORRECTIONS[name]).parameters for name in ("tis", "icepop")} == {
        False
    }


@pytest.fixture(scope="module")
def rollout():
    """Samples whose engine disagrees with the trainer, with scored steps."""
    policy = exact_policy(num_layers=1, hidden_size=16)
    shard = add_steps(make_shard(policy, make_config(rollout=SMALL), seed=3))
    draw = random.Random(1)
    for sample in shard.samples:
        sample.rollout_log_probs = [value + draw.uniform(-0.25, 0.25) for value in sample.rollout_log_probs]
    return policy, shard


def computed_batch(shard, config, exact):
    """The batch of a rollout with old, reference and current log-probs that differ, by sample, in float64."""
    estimator, settings = build_estimator(config.algorithm)
    values = torch.tensor([v for row in values_for(shard)["values"] for v in row])
    kl_to_ref = torch.cat([exact[s.index]["old"] - exact[s.index]["ref"] for s in shard.samples])
    with patch.object(batch_module, "estimate", partial(estimators.estimate, dtype=torch.float64)):
        batch = make_batch(shard, estimator, settings, torch.device("cpu"), kl=kl_to_ref, values=values)
    batch.old_log_probs = torch.cat([exact[s.index]["old"] for s in shard.samples])
    batch.ref_log_probs = torch.cat([exact[s.index]["ref"] for s in shard.samples])
    return batch


def exact_log_probs(shard):
    draw = random.Random(2)
    found = {}
    for sample in shard.samples:
        old = torch.tensor([-draw.uniform(0.1, 3) for _ in range(sample.response_length)], dtype=torch.float64)
        noise = [torch.tensor([draw.uniform(-0.15, 0.15) for _ in old], dtype=torch.float64) for _ in range(4)]
        sample.rollout_log_probs = (old + noise[0]).tolist()
        found[sample.index] = {
            "old": old,
            "ref": old + noise[1],
            "current": old + noise[2],
            "entropy": (1 + noise[3]).abs(),
        }
    return found


def loss_and_gradients(objective, shard, batch, exact, cut):
    """Loss, and the gradient that reaches each sample's log-probs and entropies, when the step is cut into parts."""
    leaves = {
        s.index: (
            exact[s.index]["current"].clone().requires_grad_(),
            exact[s.index]["entropy"].clone().requires_grad_(),
        )
        for s in shard.samples
    }
    ((own, trained),) = optimizer_steps(shard, 1)
    total = objective.total(trained, batch.select(own))
    losses = []
    for indices in cut:
        part = batch.select(indices)
        log_probs, entropies = (torch.cat([leaves[s.index][k] for s in part.samples]) for k in (0, 1))
        result = objective(part, TokenOutputs(log_probs, entropies, 0), total)
        result.loss.backward()
        losses.append(result.loss.detach())
    gradients = [torch.cat([leaves[s][k].grad for s in sorted(leaves)]) for k in (0, 1)]
    return sum(losses), torch.cat(gradients)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.filterwarnings("ignore:.*one valid sample")
def test_every_combination(rollout, estimator, correction):
    """Any cut and any order give the same loss and gradient to 1e-10; NaN under the masks changes no bit."""
    shard = copy.deepcopy(rollout[1])
    exact = exact_log_probs(shard)
    shuffled = shard_of(random.Random(5).sample(shard.samples, len(shard.samples)))
    everything = list(range(len(shard.samples)))
    for loss, aggregation in product(LOSSES, AGGREGATIONS):
        config = make_config(rollout=SMALL, algorithm=settings_of(estimator, loss, aggregation, correction))
        objective = Objective(config)
        batch = computed_batch(shard, config, exact)
        value, gradient = loss_and_gradients(objective, shard, batch, exact, [everything])
        assert gradient.isfinite().all()
        assert gradient.abs().sum() > 0
        other = computed_batch(shuffled, config, exact)
        parts = loss_and_gradients(objective, shuffled, other, exact, [[4, 1], [0], [5, 2, 3]])
        torch.testing.assert_close(parts, (value, gradient), rtol=0, atol=1e-10)
        poison_masked(batch)
        again = loss_and_gradients(objective, shard, batch, exact, [everything])
        assert torch.equal(again[0], value)
        assert torch.equal(again[1], gradient)


def poison_masked(batch: TrainBatch) -> None:
    hidden = batch.mask == 0
    assert hidden.any()
    for name in ("advantages", "rollout_log_probs", "old_log_probs", "ref_log_probs"):
        getattr(batch, name)[hidden] = float("nan")


def test_the_combinations_reject_tokens_at_all(rollout):
    shard = copy.deepcopy(rollout[1])
    exact = exact_log_probs(shard)
    for correction in CORRECTIONS:
        config = make_config(rollout=SMALL, algorithm=settings_of("grpo", "clipped", "token_mean", correction))
        objective = Objective(config)
        total = objective.total(shard.num_trained_tokens, computed_batch(shard, config, exact))
        may_reject = objective.rejects
        assert may_reject == (config.algorithm.correction in REJECTING and "stays" not in correction)
        assert (total.tokens < sum(shard.num_trained_tokens)) == may_reject
        assert total.tokens > 0


CHOICES = [
    ("grpo", "clipped", "token_mean", "mis token"),
    ("rloo", "reinforce", "sequence_sum", "tis token"),
    ("reinforce_plus_plus", "clipped", "token_mean", "none"),
    ("reinforce_plus_plus_baseline", "cispo", "token_mean", "icepop"),
    ("ppo", "clipped", "constant", "mis geometric"),
    ("step_wise", "gspo", "sequence_mean", "tis sequence"),
]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("steps", [1, 2])
def test_the_worker_trains_with_each_method(rollout, choice, steps):
    """Two rollouts of the whole trainer, in one pass a step and cut small, end at the same weights."""
    ends = []
    for limit in (10_000, 20):
        trainer = {"max_tokens_per_micro_batch": limit, "num_steps_per_rollout": steps, "lr": 1e-3, "adam_eps": 1e-3}
        config = make_config(rollout=SMALL, algorithm=settings_of(*choice), trainer=trainer)
        policy = exact_policy(num_layers=1, hidden_size=16)
        worker = worker_for(policy, config)
        for rollout_id in range(2):
            metrics = worker.train(rollout_id, rollout[1], values_for(rollout[1]))
            assert metrics["train/grad_norm"] > 0
        ends.append(parameters_after(policy))
    assert not torch.equal(ends[0], parameters_after(exact_policy(num_layers=1, hidden_size=16)))
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    "own",
    [
        {"advantage_estimator": f"{OWN}:own_advantage"},
        {"policy_loss": f"{OWN}:own_loss"},
        {"aggregation": f"{OWN}:own_token_mean"},
        {"aggregation": f"{OWN}:own_sequence_mean"},
    ],
    ids=lambda own: next(iter(own.values())),
)
@pytest.mark.parametrize("correction", ["none", "mis token"])
def test_a_formula_of_ones_own_is_the_built_in_one(rollout, own, correction):
    how = "sequence_mean" if "sequence_mean" in str(own) else "token_mean"
    ends = []
    for algorithm in ({"aggregation": how}, {"aggregation": how} | own):
        correcting = CORRECTIONS[correction] | {"eps_clip": 0.05}
        trainer = {"max_tokens_per_micro_batch": 20, "num_steps_per_rollout": 2}
        config = make_config(rollout=SMALL, algorithm=algorithm | correcting, trainer=trainer | {"lr": 1e-3})
        policy = exact_policy(num_layers=1, hidden_size=16)
        metrics = worker_for(policy, config).train(0, rollout[1])
        ends.append((parameters_after(policy), metrics["train/loss"], metrics["train/grad_norm"]))
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["advantages_without_number", "losses_without_number"])
def test_where_a_gradient_that_is_not_finite_begins_is_counted(rollout, name):
    setting = "advantage_estimator" if name.startswith("advantages") else "policy_loss"
    config = make_config(rollout=SMALL, algorithm={setting: f"{OWN}:{name}"})
    metrics = worker_for(exact_policy(num_layers=1, hidden_size=16), config).train(0, rollout[1])
    assert metrics["train/nonfinite_grads"] == 1
    assert metrics["train/nonfinite_advantages"] == float(setting == "advantage_estimator")
    assert metrics["train/nonfinite_losses"] == 1


NOT_AS_PROMISED = {
    "losses_alone": r"a tensor of shape \[\d+\]; it must return a tensor of \d+ losses, one a token, and a dict",
    "mean_already": r"a tensor of shape \[\] as losses; it must",
    "metric_as_number": "a float as metric 'mine'; it must",
    "without_gradient": "losses without gradient",
    "sum_without_gradient": "a loss without gradient",
}


def test_a_formula_of_ones_own_must_give_what_was_asked_for(rollout):
    policy = exact_policy(num_layers=1, hidden_size=16)

    def train(**algorithm):
        worker_for(policy, make_config(rollout=SMALL, algorithm=algorithm)).train(0, rollout[1])

    with pytest.raises(ValueError, match=r"returned a list; it must return a tensor with one number"):
        train(aggregation=f"{OWN}:returns_a_list")
    with pytest.raises(ValueError, match="too_few_advantages returned a tensor of shape"):
        train(advantage_estimator=f"{OWN}:too_few_advantages")
    for name, words in NOT_AS_PROMISED.items():
        setting = "aggregation" if name == "sum_without_gradient" else "policy_loss"
        with pytest.raises(ValueError, match=f"algorithm.{setting} = {OWN}:{name} returned {words}"):
            train(**{setting: f"{OWN}:{name}"})
    with pytest.raises(ValueError, match="no 'nothing'"):
        train(policy_loss=f"{OWN}:nothing")
    assert own_advantage.__doc__


def test_a_setting_that_the_loss_does_not_read_is_refused():
    with pytest.raises(ValueError, match=r"eps_clip_c = 3.0 has no effect with algorithm.policy_loss = cispo"):
        Objective(make_config(algorithm={"policy_loss": "cispo", "eps_clip_c": 3.0}))
    with pytest.raises(ValueError, match="takes proximal_log_probs"):
        Objective(make_config(algorithm={"policy_loss": f"{OWN}:own_loss", "use_decoupled_loss": True}))
