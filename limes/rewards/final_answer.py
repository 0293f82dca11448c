r"""Which part of a mathematical answer counts.

Only what follows the last `</think>` is looked at. Then, in this order:

1. The last complete `\boxed{}` or `\fbox{}`, or what a later "the answer is ...", "answer: ..." or "#### ..." says.
   From a box that never closes on, nothing is looked at.
2. Failing both, the last line if it is mathematics and nothing else.
3. Failing that, the last formula (`$...$`, `\(...\)`, `\[...\]`), tuple, root, fraction or number.
"""

from __future__ import annotations

import re

from limes.rewards.text import after_thinking, find_boxes, last_line

FUNCTIONS = "sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|inf|infinity|and|deg"
SHORT_WORDS = "am|an|as|at|be|by|do|go|he|if|is|it|me|my|no|of|on|so|to|up|us|we"
WORDS = re.compile(
    rf"(?<![A-Za-z])(?:(?!(?:{FUNCTIONS})(?![A-Za-z]))[A-Za-z]{{3,}}|(?:{SHORT_WORDS})(?![A-Za-z]))", re.I
)
COMMANDS = re.compile(
    r"\\(?:text|textbf|mathrm|mbox|operatorname)\s*\{[^{}]*\}|\\(?:begin|end)\s*\{[a-z]*\}|\\[A-Za-z]+"
)
SYMBOLS = "\u00b0\u03c0\u221a\u00d7\u00f7\u00b7\u221e\u2264\u2265\u2260\u00b1\u2212"
MATHS = re.compile(rf"[A-Za-z0-9\s\\{{}}()\[\].,:;+\-*/^_=<>!|%$'{SYMBOLS}]+")

NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
SIGNED = rf"(?:(?<![0-9A-Za-z)\]}}])[-\u2212]\s?)?(?:{NUMBER})"
ARGUMENT = r"\s*(?:\{[^{}]*\}|[0-9])"
PIECES = re.compile(
    rf"""
    \$\$(?P<display>[^$]+)\$\$
    | (?<![\\0-9])\$(?P<inline>[^$\n]+)\$
    | \\\((?P<round>(?:(?!\\\)).)+)\\\)
    | \\\[(?P<square>(?:(?!\\\]).)+)\\\]
    | (?P<tuple>[(\[]\s*{SIGNED}(?:\s*,\s*{SIGNED})+\s*[)\]])
    | (?P<latex>-?[0-9]*\s?\\(?:[dtc]?frac{ARGUMENT}{ARGUMENT}|sqrt(?:\[[0-9]+\])?{ARGUMENT})(?:\s*\\pi)?)
    | (?P<number>{SIGNED}(?:\s?/\s?(?:{NUMBER}))?(?:\s?\\?%)?)
    """,
    re.VERBOSE | re.DOTALL,
)
MARK = re.compile(
    r"\banswer\b[\s*_]*(?:\bis\b|\bare\b|[:=])[\s*_:]*|\bfinal\s+answer\b[*_]*\s*\n\s*|^####\s*", re.I | re.MULTILINE
)
EDGES = " \t*_#`>"
SENTENCE_END = re.compile(r"[.!?](?:\s|$)")


def final_answer(response: str) -> str | None:
    """The text of the answer that counts, maybe empty; None when there is none."""
    text = after_thinking(response)
    boxes = find_boxes(text)
    text = text[: boxes.unfinished]
    marked = _marked(text, boxes.end)
    if marked is not None:
        return marked
    if boxes.content is not None:
        return boxes.content
    line = stripped(last_line(text))
    if is_mathematics(line):
        return line
    pieces = list(PIECES.finditer(text))
    return _piece(pieces[-1]) if pieces else None


def final_words(response: str) -> str:
    """The text of the answer where the label is words: the last box, or what a later mark says, or the last line."""
    text = after_thinking(response)
    boxes = find_boxes(text)
    marks = [mark.end() for mark in MARK.finditer(text) if mark.end() > boxes.end]
    if marks:
        return stripped(text[marks[-1] :].split("\n", 1)[0])
    return boxes.content if boxes.content is not None else stripped(last_line(text))


def is_mathematics(text: str) -> bool:
    """Whether a text is a formula and no prose: a digit, letter or command, nothing outlandish, and no words."""
    if not MATHS.fullmatch(text) or not re.search(r"[A-Za-z0-9\u03c0\u221e]", text):
        return False
    return not WORDS.search(COMMANDS.sub(" ", text))


def stripped(text: str) -> str:
    """A line without Markdown, the marks around a formula, and the full stop at its end."""
    text = text.strip(EDGES)
    text = text.removesuffix(".").strip(EDGES)
    whole = PIECES.fullmatch(text)
    return _piece(whole) if whole else text


def _marked(text: str, box_end: int) -> str | None:
    """What the last mark after `box_end` says, passing over marks that say nothing."""
    said = None
    for mark in MARK.finditer(text):
        if mark.end() > box_end:
            line = text[mark.end() :].split("\n", 1)[0]
            said = _said(line, bare=mark.group().startswith("#")) or said
    return said


def _said(line: str, *, bare: bool) -> str | None:
    """The answer in a line that follows a mark; `bare` lines are an answer and nothing else."""
    whole = stripped(line)
    if is_mathematics(whole):
        return whole
    if bare:
        return None
    sentence = SENTENCE_END.split(line, maxsplit=1)[0]
    pieces = list(PIECES.finditer(sentence))
    if not pieces:
        return None
    formula = next((piece for piece in pieces if piece.lastgroup not in ("number", "tuple")), None)
    after_equals = next((piece for piece in pieces if piece.start() > sentence.rfind("=")), pieces[-1])
    return _piece(formula or after_equals)


def _piece(piece: re.Match[str]) -> str:
    """The content of a formula; the last number of one that is prose."""
    assert piece.lastgroup is not None
    content = piece.group(piece.lastgroup).strip()
    if piece.lastgroup in ("display", "inline", "round", "square") and not is_mathematics(content):
        numbers = list(re.finditer(SIGNED, content))
        return numbers[-1].group() if numbers else content
    return content
