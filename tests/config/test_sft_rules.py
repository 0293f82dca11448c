"""Settings that mean nothing under supervised fine-tuning are refused."""

import pytest

from limes.config import batch_algebra, load_config

BASE = {"rollout.num_rollout": 3, "algorithm.loss": "sft", "rollout.n_samples_per_prompt": 1}

BROKEN = [
    ({"algorithm.kl_loss_coef": 0.1}, "algorithm.kl_loss_coef = 0.1 has no effect with algorithm.loss = sft"),
    ({"algorithm.kl_coef": 0.1}, "algorithm.kl_coef = 0.1 has no effect"),
    ({"algorithm.advantage_estimator": "ppo"}, "algorithm.advantage_estimator = ppo has no effect"),
    ({"algorithm.eps_clip": 0.1}, "algorithm.eps_clip = 0.1 has no effect"),
    ({"algorithm.entropy_coef": 0.1}, "algorithm.entropy_coef = 0.1 has no effect"),
    ({"algorithm.truncated": "mask"}, "algorithm.truncated = mask has no effect"),
    ({"critic.lr": 0.1}, "critic.lr = 0.1 has no effect with algorithm.loss = sft, which has no critic"),
    ({"teacher.path": "x"}, "teacher.path = x has no effect"),
    ({"model.ref_path": "x"}, "model.ref_path = x has no effect"),
    ({"reward.kind": "exact"}, "reward.kind = exact has no effect with algorithm.loss = sft, which rewards nothing"),
    ({"rollout.n_samples_per_prompt": 2}, "the answers are those of the data; set it to 1"),
    ({"eval.n_samples_per_prompt": 2}, "evaluation is the loss on the answers of the data; set it to 1"),
    ({"rollout.temperature": 0.5}, "leave it out, or set eval.temperature for the answers that are shown"),
    ({"rollout.min_p": 0.5}, "which samples nothing to train on; leave it out"),
    ({"rollout.dynamic_sampling_filter": "nonzero_std"}, "rollout.dynamic_sampling_filter = nonzero_std has no effect"),
    ({"rollout.over_sampling_batch_size": 9}, "rollout.over_sampling_batch_size = 9 has no effect"),
    ({"trainer.num_steps_per_rollout": 3}, "does not divide the 8 samples"),
    ({"algorithm.aggregation_constant": 2.0}, "has no effect with algorithm.aggregation = token_mean"),
]


@pytest.mark.parametrize(("overrides", "fragment"), BROKEN)
def test_settings_of_another_method_are_refused(overrides: dict, fragment: str) -> None:
    with pytest.raises(ValueError, match=r"sft|aggregation|divide") as caught:
        load_config(None, BASE | overrides)
    assert fragment in str(caught.value)


def test_what_it_reads_may_be_set() -> None:
    config = load_config(None, BASE | {"algorithm.aggregation": "sequence_mean", "eval.temperature": 0})
    assert config.algorithm.is_supervised
    assert batch_algebra(config).max_answer_tokens is None
