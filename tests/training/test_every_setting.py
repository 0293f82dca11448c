"""Every setting of the algorithm reaches the numbers: an option that is checked and then not handed on is seen."""

import copy
import random

import pytest
import torch
from algorithm_cases import OWN, add_steps, values_for
from training_cases import exact_policy, make_config, make_shard, parameters_after, worker_for

from limes.config.algorithm import AlgorithmConfig
from limes.records import Sample, TrainShard

SMALL = {"batch_size": 3, "n_samples_per_prompt": 3, "num_rollout": 10, "max_response_len": 8}
KL, LOSS_KL = {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.5}, {"kl_loss_coef": 0.5}
MIS = {"correction": "mis", "correction_low": 0.9, "correction_high": 1.1}
STEP_WISE = {"advantage_estimator": "step_wise"}

# settings beside which a change of one must be seen, and the change
CHANGES: dict[str, list[tuple[dict, object]]] = {
    "advantage_estimator": [({}, "rloo"), ({}, f"{OWN}:reward_alone")],
    "advantage_std": [({}, "none"), ({}, "population"), (STEP_WISE, "none")],
    "advantage_eps": [({}, 0.5)],
    "singletons": [({}, "raw"), (STEP_WISE, "raw")],
    "normalize_advantages": [({}, True)],
    "gamma": [({"advantage_estimator": "reinforce_plus_plus"}, 0.5), ({"advantage_estimator": "ppo"}, 0.5)],
    "lambd": [({"advantage_estimator": "ppo"}, 0.5)],
    "outcome_coef": [(STEP_WISE, 0.25)],
    "policy_loss": [({}, "gspo"), ({"eps_clip": 0.001}, "cispo"), ({}, "reinforce"), ({}, f"{OWN}:own_half")],
    "eps_clip": [({}, 0.001), ({"policy_loss": "gspo"}, 0.0001), ({"policy_loss": "cispo"}, 0.001)],
    "eps_clip_high": [({"eps_clip": 0.001, "use_rollout_log_probs": True}, 0.2), ({"policy_loss": "cispo"}, 0.3)],
    "eps_clip_c": [({"eps_clip": 0.001, "use_rollout_log_probs": True}, 1.002)],
    "use_rollout_log_probs": [({}, True)],
    "use_decoupled_loss": [({}, True)],
    "aggregation": [({}, "sequence_mean"), ({}, "constant"), ({}, f"{OWN}:own_sequence_mean")],
    "aggregation_constant": [({"aggregation": "constant"}, 100.0)],
    "kl_coef": [({"advantage_estimator": "reinforce_plus_plus"}, 0.5)],
    "kl_loss_coef": [({}, 0.5)],
    "kl_loss_type": [(LOSS_KL, "k2"), (KL, "k3")],
    "use_unbiased_kl": [(LOSS_KL, True)],
    "entropy_coef": [({}, 0.1)],
    "correction": [({}, "tis"), ({}, "mis"), ({}, "icepop")],
    "correction_level": [(MIS, "sequence"), ({"correction": "tis"}, "geometric")],
    "correction_low": [({"correction": "tis"}, 0.95), (MIS, 0.8), ({"correction": "icepop"}, 0.95)],
    "correction_high": [({"correction": "tis"}, 1.05), (MIS, 1.2), ({"correction": "icepop"}, 1.05)],
    "correction_veto": [({"correction": "mis"}, 0.9)],
    "rejected_tokens": [(MIS, "stay"), ({"correction": "icepop", "correction_low": 0.9}, "stay")],
    "use_opsm": [({"use_rollout_log_probs": True}, True)],
    "opsm_delta": [({"use_opsm": True, "use_rollout_log_probs": True}, 0.15)],
}
ELSEWHERE = {
    "loss": "the other loss is supervised, with samples of its own",
    "truncated": "shapes rewards in the rollout",
    "overlong_buffer": "shapes rewards in the rollout",
    "overlong_penalty": "shapes rewards in the rollout",
    "ref_update_interval": "a matter of several rollouts, see test_reference_model",
}
CASES = [(name, base, value) for name, changes in CHANGES.items() for base, value in changes]


def test_every_setting_has_a_case() -> None:
    assert set(CHANGES) | set(ELSEWHERE) == set(AlgorithmConfig.model_fields)
    assert not set(CHANGES) & set(ELSEWHERE)


@pytest.fixture(scope="module")
def rollout() -> TrainShard:
    """Samples whose engine disagrees with the trainer, with scored steps and a group that has one scored answer."""
    policy = exact_policy(num_layers=1, hidden_size=16)
    shard = add_steps(make_shard(policy, make_config(rollout=SMALL), seed=3))
    draw = random.Random(1)
    for sample in shard.samples:
        middle = 0.1 if sample.reward == 0 else 0.0  # the policy has left bad answers behind
        sample.rollout_log_probs = [value + draw.gauss(middle, 0.1) for value in sample.rollout_log_probs]
    for position in (7, 8):
        shard.rewards[position], shard.num_trained_tokens[position] = None, 0
        shard.samples[position].metadata.clear()
    shard.rewards[6] = shard.samples[6].reward = 2.0
    return shard


def weights_after(shard: TrainShard, algorithm: dict, num_rollouts: int = 1) -> torch.Tensor:
    """Parameters after a rollout of three optimizer steps, or two of them: the first has no KL to the start."""
    trainer = {"num_steps_per_rollout": 3, "lr": 1e-2, "clip_grad": 0.0, "adam_eps": 1e-3}
    config = make_config(rollout=SMALL, algorithm=algorithm, trainer=trainer)
    policy = exact_policy(num_layers=1, hidden_size=16)
    worker = worker_for(policy, config)
    for rollout_id in range(num_rollouts):
        worker.train(rollout_id, copy.deepcopy(shard), values_for(shard))
    return parameters_after(policy)


@pytest.mark.parametrize(("name", "base", "value"), CASES, ids=lambda x: str(x) if isinstance(x, str) else None)
@pytest.mark.filterwarnings("ignore:.*one valid sample")
def test_a_setting_changes_what_is_trained(rollout: TrainShard, name: str, base: dict, value: object) -> None:
    num_rollouts = 2 if "kl_coef" in base | {name: value} else 1
    before = weights_after(rollout, base, num_rollouts)
    after = weights_after(rollout, base | {name: value}, num_rollouts)
    assert after.isfinite().all()
    assert (after - before).abs().max() > 1e-9, f"algorithm.{name} = {value} changes nothing"


@pytest.mark.filterwarnings("ignore:.*one valid sample")
def test_the_same_settings_give_the_same_bits(rollout: TrainShard) -> None:
    """So that a difference above is the setting's."""
    assert torch.equal(weights_after(rollout, {}), weights_after(rollout, {}))


def test_a_sample_of_no_tokens_changes_nobody(rollout: TrainShard) -> None:
    """An answer that is all prompt has no log-prob, no entropy and no part in any mean."""
    empty = Sample(99, 0, tokens=[3, 20, 4], reward=1.0)
    first = rollout.samples[:3]
    ends = []
    for samples in (first, [first[0], empty, *first[1:]]):
        shard = TrainShard(
            rollout_id=0,
            samples=samples,
            partition=list(range(len(samples))),
            rewards=[None if s is empty else s.reward for s in samples],
            group_ids=[s.group_index for s in samples],
            num_trained_tokens=[sum(s.loss_mask) for s in samples],
        )
        config = make_config(rollout=SMALL, algorithm={"entropy_coef": 0.1, "aggregation": "sequence_mean"})
        policy = exact_policy(num_layers=1, hidden_size=16)
        metrics = worker_for(policy, config).train(0, shard)
        ends.append((parameters_after(policy), metrics["train/entropy"], metrics["train/loss"]))
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=1e-12)
