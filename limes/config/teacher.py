"""Settings of the teacher."""

from pydantic import PositiveFloat

from limes.config.base import Section


class TeacherConfig(Section):
    """A frozen model whose log-probs on the policy's own answers are added to the advantages (on-policy distillation).

    It has the policy's vocabulary and works beside every estimator.
    """

    path: str | None = None
    """The model, as in `model.path`; no teacher by default."""

    opd_coef: PositiveFloat = 1.0
    """Weight of teacher less policy log-prob in the advantage of each token."""
