r"""Whether a mathematical answer equals the label; runs in a worker process only.

Both texts are parsed as LaTeX by math-verify and compared by it. Its other parser, which hands text to Python's `eval`,
is never used, and sympy's own way there takes arithmetic only (see `guard`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from limes.rewards.choice import picked_letter
from limes.rewards.final_answer import EDGES, final_answer, final_words
from limes.rewards.guard import guard_sympy
from limes.rewards.text import after_thinking, last_box

CAPITAL = re.compile(r"\(?([A-Z])\)?")
CAPITALS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
WORDS = re.compile(r"(?!inf(?:inity)?$)[A-Za-z]{3,}|[A-Za-z]+(?:[ '-]+[A-Za-z]+)+")
WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
GROUPED_DIGITS = re.compile(r"(?<=[0-9])(?:\\[,!; ]|\{,\}|~)(?=[0-9]{3}(?![0-9]))")
SPACED_DIGITS = re.compile(r"-?[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?")
SCIENTIFIC = re.compile(r"(?<![A-Za-z\\])([0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]+)(?![A-Za-z0-9])")
WITH_UNIT = re.compile(r"(-?[0-9][0-9,]*(?:\.[0-9]+)?)\s+[A-Za-z]{2,}(?:\s+[A-Za-z]+)*")
PLAIN_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")
SYMBOLS = {
    "\u2212": "-",
    "\u00d7": r"\times ",
    "\u00f7": r"\div ",
    "\u00b7": r"\cdot ",
    "\u03c0": r"\pi ",
    "\u221e": r"\infty ",
    "\u2264": r"\le ",
    "\u2265": r"\ge ",
}
SPELL_OUT = str.maketrans(SYMBOLS)

Equal = Callable[[str, str], bool]


def load() -> Callable[[dict[str, Any]], float]:
    """The scorer of `{"response": str, "label": str}`, tried out once.

    Raises:
        RuntimeError: math-verify is here but does not work.
    """
    guard_sympy()
    equal = make_equal()
    if not equal("1/2", r"\dfrac12") or equal("1/2", r"\frac13") or not equal("x^2+2x+1", "(x+1)^2"):
        raise RuntimeError("math-verify takes equal answers for different; reinstall math-verify[antlr4_13_2]")

    def score(request: dict[str, Any]) -> float:
        return float(scored(request["response"], label_formula(request["label"]), equal))

    return score


def scored(response: str, label: str, equal: Equal) -> bool:
    """Whether a response gives the label: a letter, words, or mathematics."""
    words = plain(cleaned(label))
    letter = CAPITAL.fullmatch(words)
    picked = picked_letter(after_thinking(response), CAPITALS) if letter else None
    if letter and picked:
        return picked == letter.group(1)
    if WORDS.fullmatch(words):
        return same_words(final_words(response), words)
    answer = final_answer(response)
    return answer is not None and same_formula(cleaned(answer), cleaned(label), equal)


def same_words(answer: str, label: str) -> bool:
    """Compare without case and white space."""
    return plain(cleaned(answer)).casefold().split() == label.casefold().split()


def make_equal() -> Equal:
    """math-verify's comparison of two formulas, without its time limits (signals; the parent keeps the time)."""
    from math_verify import LatexExtractionConfig, parse, verify

    boxed_only = [LatexExtractionConfig(boxed_match_priority=0)]

    def parsed(formula: str) -> Any:
        return parse(rf"\boxed{{{formula}}}", boxed_only, parsing_timeout=None)

    def equal(label: str, answer: str) -> bool:
        return bool(verify(parsed(label), parsed(answer), timeout_seconds=None))

    return equal


def label_formula(label: str) -> str:
    """The formula in a label: its last box, what follows `####`, or all of it."""
    box = last_box(label)
    return box if box is not None else label.rpartition("####")[2]


def same_formula(answer: str, label: str, equal: Equal) -> bool:
    """Compare two cleaned formulas; an answer may have a unit where the label is a plain number."""
    if not answer or not label:
        return False
    if answer == label:
        return True
    with_unit = WITH_UNIT.fullmatch(answer)
    if with_unit and PLAIN_NUMBER.fullmatch(label):
        answer = with_unit.group(1)
    return equal(label, answer)


def cleaned(formula: str) -> str:
    """A formula with one way to write numbers and signs, and nothing around it."""
    formula = formula.strip().strip(EDGES).strip("$").translate(SPELL_OUT).strip()
    formula = formula.removesuffix(".").strip()
    formula = GROUPED_DIGITS.sub("", formula)
    if SPACED_DIGITS.fullmatch(formula):
        formula = formula.replace(" ", "")
    return SCIENTIFIC.sub(r"\1\\times 10^{\2}", formula)


def plain(formula: str) -> str:
    r"""A formula as words: `\text{}` and the like unwrapped."""
    return WRAPPED.sub(r"\1", formula).strip().strip("*").strip()
