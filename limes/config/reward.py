"""Settings of rewards."""

from pydantic import Field, PositiveFloat, PositiveInt

from limes.config.base import Options, Section


class RewardTerm(Section):
    """One grader of a weighted sum."""

    kind: str
    """`math`, `exact`, `regex`, `choice`, `f1`, `last_integer`, `reasoning_gym`, `remote`, or `module:function`."""

    weight: float = 1.0
    """The term's share in the sum."""

    options: Options = Field(default_factory=dict)
    """Options of the grader, such as `pattern` of `regex` or `url` of `remote`."""


class RewardConfig(Section):
    """How answers are scored."""

    kind: str = "math"
    """The grader: `math`, `exact`, `regex`, `choice`, `f1`, `last_integer`, `reasoning_gym`, `remote`, or
    `module:function`."""

    options: Options = Field(default_factory=dict)
    """Options of the grader, such as `pattern` of `regex` or `url` of `remote`."""

    terms: list[RewardTerm] = Field(default_factory=list)
    """Several graders, summed by weight; takes the place of `kind`."""

    key: str | None = None
    """The entry of a dict reward that is trained on; default: `score`."""

    group: bool = False
    """A `module:function` grader takes the samples of a whole group and returns one reward each."""

    timeout_s: PositiveFloat = 10.0
    """One grading call may take this long; later it is a grader error and the sample is unscored. Maths has its own
    limit: `options.timeout_s`."""

    num_workers: PositiveInt = 1
    """Grader processes, for `math`, `regex` and `reasoning_gym`."""
