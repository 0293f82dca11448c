"""Samples and maths cases that several reward tests share."""

from __future__ import annotations

from typing import Any

from limes.records import Sample

T15 = [
    (r"\boxed{\frac{1}{2}}", r"\frac12", 1.0),
    (r"\boxed{\frac{1}{2}}", r"\frac13", 0.0),
    (r"\boxed{\text{E}}", "E", 1.0),
    (r"\fbox{42}", "42", 1.0),
    ("**73**", "73", 1.0),
    (r"\boxed{1,234}", "1234", 1.0),
    ("(1,234)", "1234", 0.0),
    (r"50\%", r"50\%", 1.0),
    (r"50\%", "0.5", 1.0),
    (r"3\text{ cm}", "3", 1.0),
    ("x=5", "5", 1.0),
    (r"\boxed{}", "5", 0.0),
    (r"\boxed{}", "0", 0.0),
    ("0.333", "1/3", 0.0),
    ("__import__('os').system('touch pwned')", "5", 0.0),
    (r"\dfrac12", ".5", 1.0),
]
"""Answer, label, reward: the rows of oracle T15, all but the power tower and the empty label."""

TOWER = r"\boxed{5^{5^{5^{5^{5}}}}}"


def answered(response: str, label: Any = None, *, group: int = 0, **fields: Any) -> Sample:
    """A sample whose answer is done."""
    return Sample(index=0, group_index=group, response=response, label=label, **fields)
