"""Settings of the algorithm that contradict one another are refused, with the fix."""

import pytest

from limes.config import load_config

BASE = {"rollout.num_rollout": 1}
BASELINES = ["grpo", "rloo", "reinforce_plus_plus_baseline"]


def algorithm(**settings):
    return {f"algorithm.{name}": value for name, value in settings.items()}


REFUSED = [
    (algorithm(advantage_estimator="reinforce_plus_plus", kl_coef=0.1, kl_loss_coef=0.1), "set one of them to 0"),
    (algorithm(use_rollout_log_probs=True, correction="tis"), "would do so twice; set algorithm.use_rollout_log_probs"),
    (algorithm(use_decoupled_loss=True, correction="mis"), "would do so twice; set algorithm.use_decoupled_loss"),
    (algorithm(use_decoupled_loss=True, use_rollout_log_probs=True), "set one of them to false"),
    (algorithm(use_decoupled_loss=True, policy_loss="gspo"), "needs algorithm.policy_loss = clipped, not gspo"),
    (algorithm(advantage_estimator="reinforce_plus_plus", normalize_advantages=False), "leave it out"),
    (algorithm(advantage_estimator="reinforce_plus_plus_baseline", normalize_advantages=False), "leave it out"),
    *[
        (algorithm(advantage_estimator=name) | {"rollout.n_samples_per_prompt": 1}, f"= {name} nothing to compare")
        for name in BASELINES
    ],
    *[
        (
            algorithm(advantage_estimator=name, kl_coef=0.1),
            f"no effect with algorithm.advantage_estimator = {name}; use",
        )
        for name in ("grpo", "rloo", "step_wise")
    ],
    (algorithm(kl_loss_coef=0.1, kl_loss_type="k1"), "has no gradient on average; use low_var_kl"),
    (algorithm(use_unbiased_kl=True), "but algorithm.kl_loss_coef = 0; raise it"),
    (algorithm(kl_loss_type="k3"), "has no effect without a KL"),
    (algorithm(ref_update_interval=3), "has no reference to update"),
    (algorithm(correction="tis", correction_low=3.0), "= 3 is not below algorithm.correction_high = 2"),
    (algorithm(correction="mis", correction_low=0.9, correction_high=0.8), "nothing is inside"),
    (algorithm(correction="mis", correction_low=1.5), "leave out 1"),
    (
        algorithm(correction="tis", correction_veto=0.1),
        "no effect with algorithm.correction = tis; leave it out, or use mis",
    ),
    (algorithm(correction="icepop", correction_level="sequence"), "use tis or mis"),
    (algorithm(correction_high=3.0), "no effect with algorithm.correction = none"),
    (algorithm(correction="tis", rejected_tokens="stay"), "use mis or icepop"),
    (algorithm(use_opsm=True), "set algorithm.use_rollout_log_probs to true, or take 2 or more steps"),
    (algorithm(opsm_delta=0.1), "no effect with algorithm.use_opsm = false"),
    (algorithm(gamma=0.9), "gamma = 0.9 has no effect with algorithm.advantage_estimator = grpo"),
    (algorithm(advantage_estimator="rloo", advantage_std="none"), "use grpo or step_wise"),
    (algorithm(policy_loss="gsp0"), "takes `clipped`, `gspo`, `cispo` or `reinforce`, or `module:function`"),
    (algorithm(advantage_estimator=":f"), "or `module:function`"),
    ({"teacher.opd_coef": 0.5}, "has no effect without a teacher"),
    (algorithm(overlong_penalty=0.5), "has no effect without algorithm.overlong_buffer"),
    (algorithm(overlong_buffer=9) | {"rollout.max_response_len": 8}, "= 9 is above rollout.max_response_len = 8"),
]


@pytest.mark.parametrize(("overrides", "fragment"), REFUSED)
def test_contradictions_are_refused_with_the_fix(overrides: dict, fragment: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        load_config(None, BASE | overrides)
    assert fragment in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        algorithm(advantage_estimator="ppo", gamma=0.9, lambd=0.9, kl_coef=0.1),
        algorithm(advantage_estimator="reinforce_plus_plus") | {"rollout.n_samples_per_prompt": 1},
        algorithm(singletons="raw") | {"rollout.n_samples_per_prompt": 1},
        algorithm(kl_loss_coef=0.1, kl_loss_type="k1", use_unbiased_kl=True, ref_update_interval=1),
        algorithm(ref_update_interval=1, kl_loss_type="k3") | {"model.ref_path": "somewhere"},
        algorithm(correction="mis", correction_level="sequence", correction_veto=1e-4, rejected_tokens="stay"),
        algorithm(use_opsm=True) | {"trainer.num_steps_per_rollout": 2},
        algorithm(use_opsm=True, use_decoupled_loss=True),
        algorithm(policy_loss="cispo", eps_clip=1.0, eps_clip_high=0.5),
        algorithm(advantage_estimator="mine:f", policy_loss="mine:g", aggregation="mine:h", kl_coef=0.1, gamma=0.9),
        {"teacher.path": "somewhere", "teacher.opd_coef": 0.5},
        algorithm(overlong_buffer=8, overlong_penalty=0.5) | {"rollout.max_response_len": 8},
    ],
)
def test_settings_that_go_together(overrides: dict) -> None:
    load_config(None, BASE | overrides)


def test_each_correction_has_its_usual_window() -> None:
    for kind, window in (("tis", (0, 2)), ("mis", (0.5, 2)), ("icepop", (0.5, 5))):
        assert load_config(None, BASE | algorithm(correction=kind)).algorithm.correction_window == window
    own = algorithm(correction="icepop", correction_low=0.8, correction_high=1.2)
    assert load_config(None, BASE | own).algorithm.correction_window == (0.8, 1.2)
