"""Distillation from a teacher, on the student's own samples.

Three forms: an advantage term from the sampled tokens alone (`advantage_term`), a divergence over the top-k tokens of
each position (`topk_loss`), and a clipped surrogate over the same tokens (`topk_surrogate`). All log-probs are
global, that is normalised over the whole vocabulary; the support only says at which tokens they are looked at.
Teacher and student must be scored at the same temperature.

Support, for the last two: `student` and `teacher` are all the ids in the list that the log-probs were gathered at, the
student's top-k or the teacher's; `overlap` is those of the student's list that are in the teacher's too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from limes.algorithms.choices import choose
from limes.algorithms.packed import check_packed, ratio, select


def advantage_term(
    old_log_probs: Tensor,
    teacher_log_probs: Tensor,
    *,
    coef: float = 1.0,
    clip: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Token-level on-policy distillation: coef * (teacher - old), to add to any estimator's advantages.

    The negative k1 estimate of KL(student || teacher) on sampled tokens, used as a reward without discount
    (Lu et al. 2025, "On-policy distillation"; slime and OpenClaw-RL).

    Args:
        old_log_probs: `[num_tokens]` of the student that sampled.
        teacher_log_probs: `[num_tokens]` of the teacher on the same tokens.
        coef: weight of the term.
        clip: bound of |teacher - old| before the weight; None is no bound.
        mask: `[num_tokens]`, not 0 on trained tokens; elsewhere the term is 0. None is all.

    Returns:
        `[num_tokens]`, detached, in the dtype of `old_log_probs`.
    """
    check_packed(old_log_probs=old_log_probs, teacher_log_probs=teacher_log_probs, mask=mask)
    gap = select(teacher_log_probs.detach() - old_log_probs.detach(), mask)
    return (gap if clip is None else gap.clamp(-clip, clip)).to(old_log_probs.dtype) * coef


def topk_loss(
    student_log_probs: Tensor,
    teacher_log_probs: Tensor,
    *,
    support: str = "student",
    direction: str = "reverse",
    tail: str = "bin",
    student_ids: Tensor | None = None,
    teacher_ids: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Divergence between student and teacher over a few tokens of each position.

    reverse: sum_v p_student (log p_student - log p_teacher); forward: sum_v p_teacher (log p_teacher - log p_student);
    v runs over the support and, with `tail="bin"`, over one bin for all other tokens. (GKD, Agarwal et al. 2023,
    arXiv:2306.13649; SDFT and SDPO use the teacher's support, reverse, with the bin.)

    Args:
        student_log_probs: `[num_tokens, k]` of the current student, with gradient, at the ids of the support's list.
        teacher_log_probs: `[num_tokens, k]` of the teacher at the same ids.
        support: `student`, `teacher` or `overlap`.
        direction: `reverse` seeks modes, `forward` covers the teacher.
        tail: `bin`: the rest of the vocabulary is one more outcome, so the result is a lower bound of the full
            divergence and 0 only where all bins agree; `renormalised`: both are divided by their mass on the support,
            and mass outside is not seen; `none`: the bare partial sum, which may be negative.
        student_ids: `[num_tokens, k]` int64, the student's top-k; negative ids are no tokens. Needed for `overlap`.
        teacher_ids: `[num_tokens, k']`, likewise for the teacher.
        mask: `[num_tokens]`, not 0 on trained tokens; elsewhere loss and gradients are 0. None is all.

    Returns:
        Loss `[num_tokens]`, 0 where the support is empty, and detached per-token metrics.

    Raises:
        ValueError: unknown names, ids missing, shapes that differ.
    """
    in_tail = choose(_TAILS, tail, "distillation tail")
    diverge = choose(_DIRECTIONS, direction, "distillation direction")
    inside = _support(student_log_probs, teacher_log_probs, support, student_ids, teacher_ids, mask)
    student, student_mass = _restrict(student_log_probs, inside)
    teacher, teacher_mass = _restrict(teacher_log_probs.detach(), inside)
    terms = diverge(in_tail(student, student_mass), in_tail(teacher, teacher_mass))
    has_any = inside.any(-1, keepdim=True)
    bins = has_any.expand(-1, terms.shape[1] - inside.shape[1])  # the tail's column, where there is one
    loss = torch.where(torch.cat([inside, bins], dim=1), terms, 0.0).sum(-1)
    return loss, _support_metrics(inside, student_mass, teacher_mass)


def topk_surrogate(
    student_log_probs: Tensor,
    old_log_probs: Tensor,
    teacher_log_probs: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    delta_clip: float | None = None,
    support: str = "student",
    student_ids: Tensor | None = None,
    teacher_ids: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A clipped policy surrogate over the support, one advantage a token of the vocabulary.

    With w_v the old student's probabilities renormalised over the support, D_v = clip(log p_teacher - log p_old,
    +-delta_clip), A_v = w_v D_v and r_v = exp(log p_student - log p_old): sum_v max(-A_v r_v, -A_v clip(r_v)). Only r_v
    has a gradient. (OpenClaw-RL, top-K selection.)

    Args:
        student_log_probs: `[num_tokens, k]` of the current student, with gradient.
        old_log_probs: `[num_tokens, k]` of the student before this rollout's first step, recomputed by the trainer.
        teacher_log_probs: `[num_tokens, k]` of the teacher.
        eps_clip, eps_clip_high: as in `policy_loss.clipped`.
        delta_clip: bound of |D_v|; None is no bound.
        support, student_ids, teacher_ids, mask: as in `topk_loss`.

    Returns:
        Loss `[num_tokens]`, 0 where the support is empty, and detached per-token metrics.
    """
    inside = _support(student_log_probs, teacher_log_probs, support, student_ids, teacher_ids, mask)
    if old_log_probs.shape != student_log_probs.shape:
        raise ValueError(
            f"old_log_probs {list(old_log_probs.shape)} differ from the student's {list(student_log_probs.shape)}"
        )
    old, mass = _restrict(old_log_probs.detach(), inside)
    teacher, teacher_mass = _restrict(teacher_log_probs.detach(), inside)
    delta = teacher - old
    if delta_clip is not None:
        delta = delta.clamp(-delta_clip, delta_clip)
    advantages = torch.where(inside, (old - mass[:, None]).exp() * delta, 0.0)
    moved = ratio(torch.where(inside, student_log_probs, 0.0) - old)
    high = eps_clip if eps_clip_high is None else eps_clip_high
    free, bounded = -advantages * moved, -advantages * moved.clamp(1 - eps_clip, 1 + high)
    loss = torch.maximum(free, bounded).sum(-1)
    metrics = _support_metrics(inside, mass, teacher_mass)
    metrics["distill_clipfrac"] = (bounded > free).to(loss.dtype).sum(-1) / inside.sum(-1).clamp(min=1)
    metrics["distill_abs_delta"] = advantages.abs().sum(-1)
    return loss, metrics


def check_same_vocabulary(student: Mapping[str, int], teacher: Mapping[str, int]) -> None:
    """Refuse a teacher whose token ids mean something else.

    Raises:
        ValueError: a token is missing on one side or has another id; names the first one by the student's ids.
    """
    differing = sorted(set(student.items()) ^ set(teacher.items()), key=lambda item: (item[1], item[0]))
    if differing:
        token, _ = differing[0]
        raise ValueError(
            f"teacher and student have different vocabularies: {token!r} is {teacher.get(token)} in the teacher and "
            f"{student.get(token)} in the student ({len(differing)} entries differ). Distillation compares token ids: "
            "choose a teacher with the same tokenizer"
        )


def _all_student(log_probs: Tensor, student_ids: Tensor | None, _teacher_ids: Tensor | None) -> Tensor:
    return torch.ones_like(log_probs, dtype=torch.bool) if student_ids is None else student_ids >= 0


def _all_teacher(log_probs: Tensor, _student_ids: Tensor | None, teacher_ids: Tensor | None) -> Tensor:
    return _all_student(log_probs, teacher_ids, None)


def _overlap(_log_probs: Tensor, student_ids: Tensor | None, teacher_ids: Tensor | None) -> Tensor:
    if student_ids is None or teacher_ids is None:
        raise ValueError("distillation support='overlap' compares two lists: pass student_ids= and teacher_ids=")
    return (student_ids[:, :, None] == teacher_ids[:, None, :]).any(-1) & (student_ids >= 0)


_SUPPORTS: Mapping[str, Callable[[Tensor, Tensor | None, Tensor | None], Tensor]] = MappingProxyType(
    {"student": _all_student, "teacher": _all_teacher, "overlap": _overlap}
)


def _support(
    student: Tensor,
    teacher: Tensor,
    support: str,
    student_ids: Tensor | None,
    teacher_ids: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    """Bool `[num_tokens, k]`: which of the gathered tokens count."""
    if student.dim() != 2 or student.shape != teacher.shape:
        raise ValueError(
            f"top-k log-probs must be [num_tokens, k], got {list(student.shape)} and {list(teacher.shape)}"
        )
    inside = choose(_SUPPORTS, support, "distillation support")(student, student_ids, teacher_ids)
    if inside.shape != student.shape:
        raise ValueError(f"ids {list(inside.shape)} are not those of log-probs {list(student.shape)}")
    if mask is None:
        return inside
    check_packed(mask=mask, first_of_each=student[:, 0])
    return inside & (mask != 0)[:, None]


def _restrict(log_probs: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs with 0 outside the support, and the log of their mass inside; both harmless where it is empty."""
    empty = ~inside.any(-1, keepdim=True)
    outside = torch.where(empty, 0.0, float("-inf")).to(log_probs.dtype)
    return torch.where(inside, log_probs, 0.0), torch.where(inside, log_probs, outside).logsumexp(-1)


def _with_bin(log_probs: Tensor, log_mass: Tensor) -> Tensor:
    """One more column: log(1 - mass), with the mass held a rounding step below 1."""
    below = log_mass.clamp(max=-torch.finfo(log_mass.dtype).eps)
    return torch.cat([log_probs, torch.log(-torch.expm1(below))[:, None]], dim=1)


def _renormalised(log_probs: Tensor, log_mass: Tensor) -> Tensor:
    return log_probs - log_mass[:, None]


def _bare(log_probs: Tensor, _log_mass: Tensor) -> Tensor:
    return log_probs


_TAILS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {"bin": _with_bin, "renormalised": _renormalised, "none": _bare}
)


def _reverse(student: Tensor, teacher: Tensor) -> Tensor:
    return student.exp() * (student - teacher)


def _forward(student: Tensor, teacher: Tensor) -> Tensor:
    return teacher.exp() * (teacher - student)


_DIRECTIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {"reverse": _reverse, "forward": _forward}
)


def _support_metrics(inside: Tensor, student_mass: Tensor, teacher_mass: Tensor) -> dict[str, Tensor]:
    empty = ~inside.any(-1)
    return {
        "distill_support": inside.sum(-1).to(student_mass.dtype),
        "distill_student_mass": torch.where(empty, 0.0, student_mass.detach().exp()),
        "distill_teacher_mass": torch.where(empty, 0.0, teacher_mass.exp()),
    }
