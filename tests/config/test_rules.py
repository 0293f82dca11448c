"""Rules between settings, derived values and the batch algebra."""

from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from limes.config import batch_algebra, load_config
from limes.config.derived import AT_START, FOLLOWS, effective
from limes.config.schema import leaves

BASE = {"rollout.num_rollout": 10}
PPO = {"algorithm.advantage_estimator": "ppo"}
OWN_EPOCHS = {"rollout.num_rollout": None, "rollout.num_epoch": 2}

BROKEN = [
    ({"rollout.num_rollout": None}, "rollout.num_rollout and rollout.num_epoch are both unset; set one"),
    (
        {"rollout.over_sampling_batch_size": 4},
        "over_sampling_batch_size = 4 is below rollout.batch_size = 8; raise it to 8",
    ),
    ({"trainer.num_steps_per_rollout": 3}, "num_steps_per_rollout = 3 does not divide the 64 samples of a rollout"),
    ({"trainer.num_steps_per_rollout": 100}, "use 16, 32, 64, or change the batch"),
    (
        {"rollout.n_samples_per_prompt": 1},
        "n_samples_per_prompt = 1 leaves algorithm.advantage_estimator = grpo nothing",
    ),
    (
        {
            "rollout.n_samples_per_prompt": 1,
            "rollout.dynamic_sampling_filter": "nonzero_std",
            "algorithm.advantage_estimator": "reinforce_plus_plus",
        },
        "dynamic_sampling_filter = nonzero_std drops every group with rollout.n_samples_per_prompt = 1",
    ),
    ({"rollout.temperature": 0}, "rollout.temperature = 0 draws the same answer"),
    ({"rollout.top_p": 0.9}, "set it to 1.0 for training (eval.top_p may differ)"),
    ({"rollout.top_k": 50}, "set it to -1 for training (eval.top_k may differ)"),
    ({"rollout.min_p": 0.1}, "rollout.min_p = 0.1 makes the engine sample from another distribution"),
    ({"rollout.min_new_tokens": 1}, "rollout.min_new_tokens = 1 makes the engine sample from another distribution"),
    ({"algorithm.eps_clip_high": 0.1}, "algorithm.eps_clip_high = 0.1 is below algorithm.eps_clip = 0.2; raise it"),
    ({"algorithm.eps_clip_c": 1.2}, "algorithm.eps_clip_c = 1.2 is inside the clip range, which ends at 1.2"),
    (
        {"algorithm.aggregation_constant": 5},
        "aggregation_constant = 5.0 has no effect with algorithm.aggregation = token_mean",
    ),
    ({"trainer.min_lr": 1e-9}, "trainer.min_lr = 1e-09 has no effect with trainer.lr_schedule = constant"),
    ({"trainer.min_lr": 1.0, "trainer.lr_schedule": "cosine"}, "trainer.min_lr = 1.0 is above trainer.lr = 1e-06"),
    ({"critic.lr": 1e-3}, "critic.lr = 0.001 has no effect with algorithm.advantage_estimator = grpo"),
    ({"critic.path": "x"}, "set the estimator to ppo, or leave critic.path out"),
    ({"critic.value_clip": None}, "critic.value_clip = None has no effect"),
    ({"critic.num_critic_only_steps": 1}, "critic.num_critic_only_steps = 1 has no effect"),
    (
        {**PPO, "rollout.num_rollout": 3, "critic.num_critic_only_steps": 3},
        "critic.num_critic_only_steps = 3 leaves the policy none of rollout.num_rollout = 3; lower it to 2 or less",
    ),
    ({**PPO, "critic.min_lr": 1e-9}, "critic.min_lr = 1e-09 has no effect with critic.lr_schedule = constant"),
    ({**PPO, "critic.min_lr": 1, "critic.lr_schedule": "linear"}, "critic.min_lr = 1.0 is above critic.lr = 1e-05"),
]
BROKEN_ALWAYS = [
    ({"rollout.min_new_tokens": 300}, "min_new_tokens = 300 is above rollout.max_response_len = 256; lower it to 256"),
    (
        {"rollout.min_new_tokens": 9, "eval.max_response_len": 8},
        "min_new_tokens = 9 is above eval.max_response_len = 8",
    ),
    ({"engine.max_context_len": 256}, "engine.max_context_len = 256 does not hold a prompt of 1 token and"),
    ({"engine.max_context_len": 300, "data.max_prompt_len": 50}, "raise it to 306 or more"),
    ({"engine.kv_cache_tokens": 100}, "engine.kv_cache_tokens = 100 does not hold"),
    ({"eval.n_samples_per_prompt": 2, "eval.temperature": 0}, "the same answer 2 times at temperature 0; set it to 1"),
    ({"run.name": "a/b"}, 'run.name = "a/b" is not a folder name'),
    ({"reward.group": True}, 'reward.group = true needs a grader of your own, not reward.kind = "math"'),
]


@pytest.mark.parametrize(("overrides", "fragment"), BROKEN + BROKEN_ALWAYS)
def test_settings_that_do_not_go_together(overrides: dict, fragment: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        load_config(None, BASE | overrides)
    assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "fragment"),
    [
        ("rollout.stop", ["", "x"], 'rollout.stop[0] = "" (python): takes text that is not empty'),
        ("rollout.stop_token_ids", [3, -1], "rollout.stop_token_ids[1] = -1 (python): takes a whole number of 0 or"),
    ],
)
def test_what_can_never_stop_an_answer_is_refused(name: str, value: list, fragment: str) -> None:
    """The engine would refuse every request, and the run would train nothing."""
    with pytest.raises(ValueError, match=r".") as caught:
        load_config(None, BASE | {name: value})
    assert fragment in str(caught.value)


@pytest.mark.parametrize(("overrides", "_"), BROKEN)
def test_rules_of_training_do_not_bind_evaluation(overrides: dict, _: str) -> None:
    load_config(None, overrides | {"rollout.num_rollout": 0})


@pytest.mark.parametrize(("overrides", "fragment"), BROKEN_ALWAYS)
def test_other_rules_bind_evaluation_too(overrides: dict, fragment: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        load_config(None, overrides | {"rollout.num_rollout": 0})
    assert fragment in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        OWN_EPOCHS,
        {"rollout.over_sampling_batch_size": 8},
        {"trainer.num_steps_per_rollout": 64},
        {"eval.top_p": 0.9, "eval.top_k": 5, "eval.temperature": 0},
        {"algorithm.eps_clip_high": 0.2, "algorithm.eps_clip_c": 3.0},
        {"algorithm.aggregation": "constant", "algorithm.aggregation_constant": 5.0},
        {"trainer.min_lr": 1e-6, "trainer.lr_schedule": "linear"},
        {"critic.lr": 1e-5, "critic.path": None},
        {**PPO, "critic.lr": 1, "critic.num_critic_only_steps": 3, "rollout.n_samples_per_prompt": 1},
        {"engine.max_context_len": 306, "data.max_prompt_len": 50},
        {"reward.group": True, "reward.kind": "mine:grade"},
    ],
)
def test_settings_at_the_edge_go_together(overrides: dict) -> None:
    load_config(None, BASE | overrides)


def test_several_rules_are_reported_together() -> None:
    with pytest.raises(ValueError, match=r"2 problems with the settings:\n  rollout.over.*\n  rollout.top_p"):
        load_config(None, BASE | {"rollout.over_sampling_batch_size": 1, "rollout.top_p": 0.5})


def test_unset_settings_follow_others() -> None:
    config = load_config(None, BASE | {"rollout.temperature": 0.5, "eval.top_p": 0.9})
    assert effective(config, "eval.temperature") == 0.5
    assert effective(config, "eval.top_p") == 0.9
    assert effective(config, "rollout.over_sampling_batch_size") == 8
    assert effective(config, "engine.max_context_len") is None
    for path in [*FOLLOWS, *FOLLOWS.values(), *AT_START]:
        assert path in leaves()
    assert all(leaves()[path].default is None for path in [*FOLLOWS, *AT_START])


def test_eval_sampling() -> None:
    config = load_config(None, BASE | {"rollout.stop": ["x"], "eval.temperature": 0, "eval.max_response_len": 9})
    sampling = config.eval_sampling()
    assert (sampling.temperature, sampling.max_response_len, sampling.stop, sampling.top_k) == (0, 9, ["x"], -1)
    assert config.rollout.temperature == 1


def test_a_critic_that_learns_alone_leaves_the_policy_fewer_steps() -> None:
    alone = {**PPO, "critic.num_critic_only_steps": 4, "trainer.num_steps_per_rollout": 2}
    assert batch_algebra(load_config(None, BASE | alone)).num_optimizer_steps == 12


@settings(deadline=None)
@given(
    prompts=st.integers(1, 20),
    answers=st.integers(2, 20),
    steps=st.integers(1, 40),
    rollouts=st.integers(1, 50),
    data=st.none() | st.integers(1, 200),
)
def test_batch_algebra_adds_up(prompts: int, answers: int, steps: int, rollouts: int, data: int | None) -> None:
    names = (
        "rollout.batch_size",
        "rollout.n_samples_per_prompt",
        "trainer.num_steps_per_rollout",
        "rollout.num_rollout",
    )
    chosen = dict(zip(names, (prompts, answers, steps, rollouts), strict=True))
    if prompts * answers % steps:
        with pytest.raises(ValueError, match="does not divide"):
            load_config(None, chosen)
        return
    algebra = batch_algebra(load_config(None, chosen), data)
    assert algebra.samples_per_step * algebra.steps_per_rollout == algebra.samples == prompts * answers
    assert algebra.num_optimizer_steps == rollouts * steps
    assert algebra.rollouts_per_epoch == (None if data is None else max(1, data // prompts))


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=64, max_size=64), room=st.integers(1, 200))
def test_micro_batches_never_exceed_their_bound(lengths: list[int], room: int) -> None:
    config = load_config(
        None,
        BASE | {"data.max_prompt_len": 8, "rollout.max_response_len": 32, "trainer.max_tokens_per_micro_batch": room},
    )
    algebra = batch_algebra(config)
    assert algebra.max_sample_tokens == 40
    assert algebra.max_tokens_per_step == 64 * 40
    num, filled = 1, 0
    for length in lengths:
        if filled and filled + length > room:
            num, filled = num + 1, 0
        filled += length
    assert num <= algebra.max_micro_batches_per_step
    assert algebra.max_micro_batches_per_step == ceil(64 / max(1, room // 40))


def test_epochs_decide_the_number_of_rollouts() -> None:
    config = load_config(None, OWN_EPOCHS)
    assert batch_algebra(config).num_rollouts is None
    assert batch_algebra(config, 17).num_rollouts == 2 * 2
    both = load_config(None, {"rollout.num_rollout": 3, "rollout.num_epoch": 2})
    assert batch_algebra(both, 17).num_rollouts == 3
    assert batch_algebra(both, 5).rollouts_per_epoch == 1


@pytest.mark.parametrize(
    ("num_prompts", "fragment"),
    [
        (0, "data.prompt_data = .* has no prompts to train on"),
        (7, "rollout.batch_size = 8 takes more prompts than the 7"),
    ],
)
def test_data_that_make_no_rollout(num_prompts: int, fragment: str) -> None:
    with pytest.raises(ValueError, match=fragment):
        batch_algebra(load_config(None, OWN_EPOCHS), num_prompts)
