"""Settings of every method, and plug-ins that repeat built-in formulas, for the tests of training."""

from __future__ import annotations

from typing import Any

import torch

from limes.algorithms.advantages import group_relative, per_token
from limes.algorithms.packed import trained_lengths
from limes.records import TrainShard

LOSSES: dict[str, dict[str, Any]] = {
    "clipped": {"eps_clip": 0.1, "eps_clip_high": 0.2, "eps_clip_c": 3.0},
    "gspo": {"eps_clip": 0.05},
    "cispo": {"eps_clip": 1.0, "eps_clip_high": 0.1},
    "reinforce": {},
}
WINDOW = {"correction_low": 0.9, "correction_high": 1.1}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "icepop": WINDOW,
    "mis that stays": {"correction": "mis", "rejected_tokens": "stay"} | WINDOW,
    **{
        f"{kind} {level}": {"correction": kind, "correction_level": level} | WINDOW
        for kind in ("tis", "mis")
        for level in ("token", "sequence", "geometric")
    },
}
REWARD_KL = {"kl_coef": 0.05}
ESTIMATORS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage_std": "population"},
    "rloo": {},
    "reinforce_plus_plus": {"gamma": 0.9} | REWARD_KL,
    "reinforce_plus_plus_baseline": REWARD_KL,
    "ppo": {"gamma": 0.9, "lambd": 0.8, "normalize_advantages": True} | REWARD_KL,
    "step_wise": {"outcome_coef": 0.5},
}
OWN = "algorithm_cases"


def settings_of(estimator: str, loss: str, aggregation: str, correction: str) -> dict[str, Any]:
    """The `algorithm` section of one combination."""
    return {
        "advantage_estimator": estimator,
        "policy_loss": loss,
        "aggregation": aggregation,
        "correction": correction,
        "entropy_coef": 0.01,
        **ESTIMATORS[estimator],
        **LOSSES[loss],
        **CORRECTIONS[correction],
    }


def add_steps(shard: TrainShard) -> TrainShard:
    """Give each sample two scored steps, or one where it has one token."""
    for sample in shard.samples:
        middle, end = sample.response_length // 2, sample.response_length
        spans = [[0, middle], [middle, end]] if middle else [[0, end]]
        scores = [float((3 * sample.index + k) % 5) for k in range(len(spans))]
        sample.metadata["step_wise"] = {"step_scores": scores, "step_token_spans": spans}
    return shard


def values_for(shard: TrainShard) -> dict[str, list[list[float]]]:
    """Values that depend on the sample and the place alone."""
    return {"values": [[((5 * s.index + t) % 7) / 7 for t in range(s.response_length)] for s in shard.samples]}


def own_advantage(inputs, settings):
    """`grpo` again."""
    relative = group_relative(inputs.rewards, inputs.group_ids, std=settings.std, eps=settings.eps, valid=inputs.valid)
    own = relative if inputs.partition is None else relative[torch.as_tensor(inputs.partition)]
    return per_token(own, inputs.lengths, inputs.mask)


def own_loss(log_probs, old_log_probs, advantages, *, lengths, mask, eps_clip, eps_clip_high=None):
    """`clipped` again."""
    ratio = (log_probs - torch.where(mask != 0, old_log_probs, 0.0)).exp()
    high = eps_clip if eps_clip_high is None else eps_clip_high
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - eps_clip, 1 + high) * advantages)
    return torch.where(mask != 0, loss, 0.0), {"own": ratio.detach()}


def own_token_mean(losses, mask, lengths, *, num_tokens, num_sequences):
    """`token_mean` again."""
    return torch.where(mask != 0, losses, 0.0).sum() / num_tokens


def own_sequence_mean(losses, mask, lengths, *, num_tokens, num_sequences):
    """`sequence_mean` again."""
    per_sequence = torch.repeat_interleave(trained_lengths(mask, lengths).clamp(min=1), torch.as_tensor(lengths))
    return (torch.where(mask != 0, losses, 0.0) / per_sequence).sum() / num_sequences


def returns_a_list(losses, mask, lengths, *, num_tokens, num_sequences):
    """No number."""
    return [1.0]


def too_few_advantages(inputs, settings):
    """Not one a token."""
    return torch.zeros(3)


def sum_of_tokens(sample):
    """A reward that hardly ever is the same twice."""
    return float(sum(sample.tokens))


def own_half(log_probs, old_log_probs, advantages, *, lengths, mask):
    """Half of `reinforce`."""
    return torch.where(mask != 0, -advantages * log_probs / 2, 0.0), {}


def reward_alone(inputs, settings):
    """The reward on every token, without a baseline."""
    rewards = torch.tensor([0.0 if reward is None else float(reward) for reward in inputs.rewards])
    own = rewards if inputs.partition is None else rewards[torch.as_tensor(inputs.partition)]
    return per_token(own, inputs.lengths, inputs.mask)


def advantages_without_number(inputs, settings):
    return torch.full((inputs.mask.numel(),), float("nan"))


def losses_without_number(log_probs, old_log_probs, advantages, *, lengths, mask):
    return log_probs / 0, {}


def losses_alone(log_probs, old_log_probs, advantages, *, lengths, mask):
    return log_probs


def mean_already(log_probs, old_log_probs, advantages, *, lengths, mask):
    return log_probs.mean(), {}


def metric_as_number(log_probs, old_log_probs, advantages, *, lengths, mask):
    return log_probs, {"mine": 1.0}


def without_gradient(log_probs, old_log_probs, advantages, *, lengths, mask):
    return log_probs.detach(), {}


def sum_without_gradient(losses, mask, lengths, *, num_tokens, num_sequences):
    return losses.detach().sum()
