"""The policy's objective of one token: policy loss x correction + KL + entropy.

What `token_losses` returns goes into `aggregate`; the number that is logged is the number that is optimised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from limes.algorithms import kl
from limes.algorithms.choices import choose
from limes.algorithms.packed import Lengths, check_packed, select
from limes.algorithms.policy_loss import POLICY_LOSSES, PolicyLoss


def token_losses(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    lengths: Lengths,
    mask: Tensor,
    policy_loss: str | PolicyLoss,
    settings: Mapping[str, Any],
    weights: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    kl_loss_coef: float = 0.0,
    kl_loss_type: str = "k1",
    use_unbiased_kl: bool = False,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """weight * policy_loss + kl_loss_coef * KL - entropy_coef * entropy, per token.

    A group of equal rewards has advantages of 0: it then gets exactly the gradient of the KL and entropy terms, which
    is none at all when both coefficients are 0, and its tokens stay in the denominators.

    Args:
        log_probs: `[num_tokens]` of the current policy, with gradient.
        old_log_probs: `[num_tokens]` of the policy before this rollout's first step.
        advantages: `[num_tokens]`.
        lengths: tokens of each sequence.
        mask: `[num_tokens]`, not 0 on trained tokens. To leave tokens out that a correction rejected, give the mask
            without them (`corrections.kept`), here and to `aggregate`.
        policy_loss: a name in `POLICY_LOSSES`, or a function of the same form.
        settings: keyword arguments of that loss, such as `eps_clip`.
        weights: `[num_tokens]` from a correction, on the policy loss alone; None is 1.
        ref_log_probs: `[num_tokens]` of the reference, for the KL. Given, the KL is measured even when its weight is 0.
        kl_loss_coef, kl_loss_type: weight and kind of `kl.penalty`.
        use_unbiased_kl: weigh the KL by the importance ratio to `old_log_probs`.
        entropy: `[num_tokens]` of the policy at the sampling temperature, with gradient where it has a weight.
        entropy_coef: weight of the entropy bonus.

    Returns:
        Loss `[num_tokens]`, and detached per-token metrics: those of the policy loss, `pg_loss`, and where given
        `kl_loss` and `entropy`, both without their weights.

    Raises:
        ValueError: unknown names, a coefficient without its tensor, shapes that differ.
    """
    loss_of = choose(POLICY_LOSSES, policy_loss, "policy_loss") if isinstance(policy_loss, str) else policy_loss
    check_packed(log_probs=log_probs, weights=weights, entropy=entropy, mask=mask)
    loss, metrics = loss_of(log_probs, old_log_probs, advantages, lengths=lengths, mask=mask, **settings)
    if weights is not None:
        loss = loss * select(weights.detach(), mask)
    metrics = metrics | {"pg_loss": loss.detach()}
    if ref_log_probs is not None:
        sampler = old_log_probs if use_unbiased_kl else None
        divergence = kl.penalty(log_probs, ref_log_probs, kl_loss_type, old_log_probs=sampler, mask=mask)
        metrics["kl_loss"] = divergence.detach()
        loss = loss + kl_loss_coef * divergence if kl_loss_coef else loss
    elif kl_loss_coef:
        raise ValueError(f"kl_loss_coef={kl_loss_coef} needs ref_log_probs, the log-probs of a reference model")
    if entropy is not None:
        bonus = select(entropy, mask)
        metrics["entropy"] = bonus.detach()
        loss = loss - entropy_coef * bonus if entropy_coef else loss
    elif entropy_coef:
        raise ValueError(f"entropy_coef={entropy_coef} needs entropy, the policy's entropy of each token")
    return loss, metrics
