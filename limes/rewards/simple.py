"""Graders that compare text: exact, token F1, last integer, multiple choice.

All of them look at what follows the last `</think>`, if there is one, and refuse an empty label.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from typing import Any

from limes.rewards.text import after_thinking, label_text, label_texts

ARTICLES = frozenset({"a", "an", "the"})
NUMBER = re.compile(r"(?<![0-9.])(?:(?<![0-9A-Za-z)])-)?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?![0-9])(\.[0-9]+)?")
INTEGER_LABEL = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)")


def exact(response: str, label: Any, *, ignore_case: bool = False) -> float:
    """1 when the answer is the label, apart from white space at both ends.

    Args:
        label: the right answer, or a list of them.
        ignore_case: compare without regard to case.

    Raises:
        ValueError: the label is empty.
    """
    answer = after_thinking(response).strip()
    labels = label_texts(label)
    if ignore_case:
        return float(answer.casefold() in [accepted.casefold() for accepted in labels])
    return float(answer in labels)


def f1(response: str, label: Any) -> float:
    """The best token F1 of the answer against the label, or against each entry of a list of labels.

    Raises:
        ValueError: the label is empty.
    """
    answer = after_thinking(response)
    return max(token_f1(answer, accepted) for accepted in label_texts(label))


def token_f1(first: str, second: str) -> float:
    """F1 of the words two texts share, counted with repetition, as in SQuAD; symmetric, between 0 and 1.

    Words are compared in lower case, without punctuation (ASCII punctuation and symbols, and Unicode categories P) and
    without a, an, the. Two texts without any word left are equal; one of them alone scores 0.
    """
    words, other = f1_words(first), f1_words(second)
    if not words or not other:
        return float(words == other)
    shared = (Counter(words) & Counter(other)).total()
    return 2 * shared / (len(words) + len(other))


def f1_words(text: str) -> list[str]:
    """The words of a text that `token_f1` compares."""
    kept = "".join(
        c for c in text.lower() if c not in string.punctuation and not unicodedata.category(c).startswith("P")
    )
    return [word for word in kept.split() if word not in ARTICLES]


def last_integer(response: str, label: Any) -> float:
    """1 when the last integer of the answer equals the label.

    A minus counts as a sign unless a digit, letter or closing bracket stands before it (`10-5` ends in 5). `1,234` is
    one number; numbers with decimals are no integers and are passed over.

    Raises:
        ValueError: the label is empty or no integer.
    """
    wanted = label_text(label)
    if not INTEGER_LABEL.fullmatch(wanted):
        raise ValueError(f"the label {wanted[:80]!r} is not an integer")
    found = find_last_integer(after_thinking(response))
    return float(found is not None and found == _canonical(wanted))


def find_last_integer(text: str) -> str | None:
    """The last integer of a text, without separators and leading zeros, or None."""
    last = None
    for match in NUMBER.finditer(text):
        if match.group(1) is None:
            last = match.group()
    return None if last is None else _canonical(last)


def _canonical(integer: str) -> str:
    """Equal integers become equal strings; no conversion, as digits may be many thousands."""
    digits = integer.lstrip("+-").replace(",", "").lstrip("0") or "0"
    return f"-{digits}" if integer.startswith("-") and digits != "0" else digits
