r"""Multiple choice: which letter an answer picks.

The first of these that names a letter decides:

1. the last complete `\boxed{}` or `\fbox{}`;
2. the last "answer is X" or "answer: X"; failing that, the last "choice X" or "option X";
3. an answer that begins with a letter and ends there or goes on with `:`, `.` or `)`: "C", "(C)", "**C**", "C: Paris";
4. a last line that is one letter;
5. the last letter in brackets, as "(C)".

Letters are capital, save after 1 and 2; a letter inside a sentence is never taken.
"""

from __future__ import annotations

import re
from typing import Any

from limes.rewards.text import after_thinking, label_text, last_box, last_line

WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|textrm)\s*\{")
NOISE = str.maketrans("", "", "*_`$\\{}\"'")
LEADING = re.compile(r"\s*[(\[]?([A-Za-z])[)\]]?\s*(?:[:.)]|$)")
PICK = r"(?:\s+(?i:is|would be)\b)?[\s:=]*[(\[]?(?:([A-Z])(?![A-Za-z'])|([a-z])\s*(?:[).:,\]]|$))"
MARKS = tuple(re.compile(rf"\b(?i:{words})\b{PICK}", re.MULTILINE) for words in ("answer", "choice|option"))
ALONE = re.compile(r"[(\[]?([A-Z])[)\]]?[.:]?")
BRACKETED = re.compile(r"[(\[]([A-Z])[)\]]")


def choice(response: str, label: Any, *, letters: str = "ABCDEFGHIJ") -> float:
    """1 when the answer picks the label's letter.

    Args:
        label: a letter, alone or as in "(C)" and "C: Paris".
        letters: what may be picked.

    Raises:
        ValueError: the label is empty or names none of the letters.
    """
    wanted = leading_letter(label_text(label), letters)
    if wanted is None:
        raise ValueError(f"the label {label_text(label)[:80]!r} names none of the letters {letters}")
    return float(picked_letter(after_thinking(response), letters) == wanted)


def picked_letter(answer: str, letters: str) -> str | None:
    """The letter that an answer picks, or None."""
    box = last_box(answer)
    if box is not None:
        return leading_letter(box, letters)
    plain = unwrapped(answer)
    for mark in MARKS:
        marked = [(capital or small).upper() for capital, small in mark.findall(plain)]
        if any(letter in letters for letter in marked):
            return [letter for letter in marked if letter in letters][-1]
    first, alone = LEADING.match(plain), ALONE.fullmatch(last_line(plain))
    for match in (first, alone):
        if match and match.group(1) in letters:
            return match.group(1)
    bracketed = [letter for letter in BRACKETED.findall(plain) if letter in letters]
    return bracketed[-1] if bracketed else None


def leading_letter(text: str, letters: str) -> str | None:
    r"""The letter that a short text begins with: `c`, `(C)`, `\text{C}`, `C: Paris`; None when it is none of them."""
    first = LEADING.match(unwrapped(text))
    return first.group(1).upper() if first and first.group(1).upper() in letters else None


def unwrapped(text: str) -> str:
    """A text without LaTeX wrappers, Markdown emphasis and quotes."""
    return WRAPPED.sub("", text).translate(NOISE).strip()
