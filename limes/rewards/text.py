"""Finding things in answers and labels. Everything here takes time linear in the text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

THINKING_ENDS = "</think>"
BRACES = re.compile(r"\\{1,2}(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)


def after_thinking(response: str) -> str:
    """The part of an answer that is meant for the reader: what follows the last `</think>`, or all of it."""
    return response.rpartition(THINKING_ENDS)[2]


@dataclass(frozen=True, slots=True)
class Boxes:
    r"""The `\boxed{}` and `\fbox{}` of a text.

    `content` and `end` belong to the last complete box; `unfinished` is where a box opens that never closes.
    """

    content: str | None = None
    end: int = -1
    unfinished: int | None = None


def find_boxes(text: str) -> Boxes:
    """Match the braces of a text and pick its last complete box; of nested ones the outermost."""
    last = Boxes()
    opened: list[tuple[int, int, bool]] = []  # start of the command, start of its content, is a box
    for match in BRACES.finditer(text):
        piece = match.group()
        if piece == "}":
            if opened:
                _, content_start, is_box = opened.pop()
                if is_box:
                    last = Boxes(text[content_start : match.start()].strip(), match.end())
        elif piece.endswith("{") and piece != r"\{":
            opened.append((match.start(), match.end(), len(piece) > 1))
    unfinished = next((start for start, _, is_box in opened if is_box), None)
    return Boxes(last.content, last.end, unfinished)


def last_box(text: str) -> str | None:
    """Content of the last complete box, or None."""
    return find_boxes(text).content


def last_tagged(text: str) -> str | None:
    """Content of the last `<answer>...</answer>`, or None."""
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    if start < 0:
        return None
    return text[start + len("<answer>") : text.index("</answer>", start)].strip()


def last_line(text: str) -> str:
    """The last line that is not blank, or an empty string."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def label_text(label: Any) -> str:
    """A label as text.

    Raises:
        ValueError: there is none; nothing may count as equal to an absent label.
    """
    text = "" if label is None else str(label).strip()
    if not text:
        raise ValueError("the label is empty; check data.label_key and the rows of the data")
    return text


def label_texts(label: Any) -> list[str]:
    """Every accepted answer: the label, or each entry of a label that is a list.

    Raises:
        ValueError: there is none, or one of them is empty.
    """
    labels = list(label) if isinstance(label, list | tuple) else [label]
    return [label_text(entry) for entry in labels] or [label_text(None)]
