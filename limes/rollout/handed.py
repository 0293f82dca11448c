"""What functions of the user's get to see of a sample: a copy, so that they cannot change what is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from limes.records import Sample

SETTLED = ("tokens", "response_length", "loss_mask", "rollout_log_probs", "weight_versions", "status")
"""Fields that training takes as the engine left them."""


def handed_out(sample: Sample) -> Sample:
    """A copy with token lists of its own; the metadata is the sample's, for the function to write into."""
    return replace(
        sample,
        tokens=list(sample.tokens),
        loss_mask=list(sample.loss_mask),
        rollout_log_probs=list(sample.rollout_log_probs),
        weight_versions=list(sample.weight_versions),
    )


def refuse_changes(sample: Sample, handed: Sample, who: str, fields: Sequence[str] = SETTLED) -> None:
    """Refuse what a function did to its copy and would have to be ignored.

    Raises:
        ValueError: names the function and the fields.
    """
    changed = [name for name in fields if getattr(sample, name) != getattr(handed, name)]
    if not isinstance(handed.metadata, dict):
        changed.append("metadata, to something else than a dict,")
    if changed:
        raise ValueError(
            f"{who} changed {', '.join(changed)} of sample {sample.index}; what was sampled is what is trained, so "
            "write into the entries of its metadata instead"
        )
