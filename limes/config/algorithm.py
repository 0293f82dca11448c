"""Settings of advantages and the loss."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, WithJsonSchema
from pydantic_core import PydanticCustomError

from limes.config.base import Section

ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo", "step_wise")
POLICY_LOSSES = ("clipped", "gspo", "cispo", "reinforce")
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "constant")
KlKind = Literal["k1", "k2", "k3", "low_var_kl"]

WINDOWS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"tis": (0.0, 2.0), "mis": (0.5, 2.0), "icepop": (0.5, 5.0)}
)
"""Corrections and their usual windows: lowest and highest importance weight."""


def is_function(name: str) -> bool:
    """The setting names a function of the user's, `module:function`."""
    module, colon, function = name.partition(":")
    return bool(module and colon and function)


def _checked(names: tuple[str, ...]) -> AfterValidator:
    def check(value: str) -> str:
        if value not in names and not is_function(value):
            raise PydanticCustomError("unknown_name", "unknown name")
        return value

    return AfterValidator(check)


def _listed(names: tuple[str, ...]) -> WithJsonSchema:
    """What help and error messages say that the setting takes."""
    return WithJsonSchema({"anyOf": [{"enum": list(names)}, {"const": "module:function"}]})


Estimator = Annotated[str, _checked(ESTIMATORS), _listed(ESTIMATORS)]
PolicyLoss = Annotated[str, _checked(POLICY_LOSSES), _listed(POLICY_LOSSES)]
Aggregation = Annotated[str, _checked(AGGREGATIONS), _listed(AGGREGATIONS)]


class AlgorithmConfig(Section):
    """From rewards to advantages to the loss."""

    loss: Literal["policy", "sft"] = "policy"
    """`policy`: answers are sampled, and rewards say which to make likelier. `sft` (supervised fine-tuning): answers
    come from the data and all are made likelier; of this section it reads the aggregation alone."""

    advantage_estimator: Estimator = "grpo"
    """Rewards to advantages: `grpo` (less the group's mean, divided by its spread), `rloo` (less the mean of the
    others), `reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `ppo` (with a critic), `step_wise` (scores of
    steps), or `module:function`, which takes (inputs, settings) and returns a value a token."""

    advantage_std: Literal["sample", "population", "none"] = "sample"
    """Spread that divides a centred reward: n-1, n, or no division (Dr.GRPO); for `grpo` and `step_wise`."""

    advantage_eps: PositiveFloat = 1e-6
    """Added to the spread."""

    singletons: Literal["zero", "raw", "error"] = "zero"
    """What a group with one scored answer gets: 0 with a warning, its raw reward, or an error."""

    normalize_advantages: bool | None = None
    """Whiten advantages over all trained tokens of the rollout; default: only REINFORCE++, which needs it."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per trained token, for `reinforce_plus_plus` and `ppo`."""

    lambd: float = Field(default=1.0, ge=0, le=1)
    """GAE's lambda, for `ppo`: 0 trusts the critic, 1 the rewards."""

    outcome_coef: float = 1.0
    """Weight of the answer's reward in the score of each of its steps, for `step_wise`."""

    policy_loss: PolicyLoss = "clipped"
    """`clipped` (PPO's ratio, a token at a time), `gspo` (one ratio an answer), `cispo` (the clipped ratio as a
    constant weight), `reinforce` (no ratio), or `module:function`, which takes what they take."""

    eps_clip: float = Field(default=0.2, gt=0, le=1)
    """Ratio clip below 1."""

    eps_clip_high: PositiveFloat | None = None
    """Ratio clip above 1; default: `eps_clip`."""

    eps_clip_c: float | None = Field(default=None, gt=1)
    """Dual clip: bound of the loss for negative advantages, as a ratio; off by default."""

    use_rollout_log_probs: bool = False
    """The engine's log-probs are the old ones: the ratio is to what sampled, and no pass of the trainer's is needed."""

    use_decoupled_loss: bool = False
    """Decoupled PPO: the trust region is around the policy at the start of the rollout's training, and each token is
    weighed by that policy over the engine's."""

    aggregation: Aggregation = "token_mean"
    """How token losses become one number: `token_mean`, `sequence_mean`, `sequence_sum`, `constant`, each counted over
    the whole optimizer step, or `module:function`, which takes (losses, mask, lengths, *, num_tokens,
    num_sequences)."""

    aggregation_constant: PositiveFloat | None = None
    """Divisor of `constant` (Dr.GRPO); default: `rollout.max_response_len`."""

    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the reference in the reward, for `reinforce_plus_plus`, its baseline form and `ppo`."""

    kl_loss_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the reference in the loss."""

    kl_loss_type: KlKind | None = None
    """Estimate of that KL: `k1`, `k2`, `k3` or `low_var_kl`; default: `k1` in the reward, `low_var_kl` in the loss."""

    use_unbiased_kl: bool = False
    """Weigh the KL in the loss by the importance ratio: unbiased when samples are off-policy."""

    ref_update_interval: PositiveInt | None = None
    """Rollouts after which the reference becomes the policy as it then is; default: never."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    correction: Literal["none", "tis", "mis", "icepop"] = "none"
    """Weights for the mismatch of trainer and engine, trainer over engine probability: `tis` clamps them to the window,
    `mis` and `icepop` reject what is outside."""

    correction_level: Literal["token", "sequence", "geometric"] = "token"
    """Whose ratio is weighed: a token's, or for all tokens of an answer their product or geometric mean."""

    correction_low: NonNegativeFloat | None = None
    """Lower end of the window; default: 0 for `tis`, 0.5 for `mis` and `icepop`."""

    correction_high: PositiveFloat | None = None
    """Upper end of the window; default: 2 for `tis` and `mis`, 5 for `icepop`."""

    correction_veto: PositiveFloat | None = None
    """`mis` also rejects answers that have a token with a ratio below this; off by default."""

    rejected_tokens: Literal["leave", "stay"] = "leave"
    """Tokens that a correction rejects leave the loss's denominator, KL and entropy included, or stay in it."""

    use_opsm: bool = False
    """Off-policy sequence masking: no loss for negative advantages in answers that the policy has left behind."""

    opsm_delta: PositiveFloat = 1e-4
    """How far behind that is: mean KL a token of the old policy to the current one, in nats."""

    truncated: Literal["keep", "zero", "mask"] = "keep"
    """Answers cut at the length limit: keep their reward, set it to 0, or leave them out of training."""

    overlong_buffer: PositiveInt | None = None
    """Last tokens before `rollout.max_response_len` over which an answer's reward falls linearly, by `overlong_penalty`
    at the limit (DAPO); off by default. It shapes what trains, not the reward that is reported or filtered by."""

    overlong_penalty: PositiveFloat = 1.0
    """How much an answer of `rollout.max_response_len` tokens loses, with `overlong_buffer`."""

    @property
    def is_supervised(self) -> bool:
        """Answers come from the data; nothing is sampled or rewarded in training."""
        return self.loss == "sft"

    @property
    def needs_reference(self) -> bool:
        """A KL to a reference is part of the reward or of the loss."""
        return bool(self.kl_coef or self.kl_loss_coef)

    @property
    def correction_window(self) -> tuple[float, float]:
        """Lowest and highest importance weight."""
        low, high = WINDOWS.get(self.correction, (0.0, float("inf")))
        return (
            low if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )
