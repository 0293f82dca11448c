from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limes.rewards import overlong_penalty, token_f1
from limes.rewards.choice import choice
from limes.rewards.final_answer import final_answer, is_mathematics
from limes.rewards.simple import exact, f1, find_last_integer, last_integer
from limes.rewards.text import after_thinking, find_boxes, last_box, last_tagged

WORDS = st.lists(st.sampled_from(["the", "a", "cat", "Cat", "sat!", "mat", "on", "..."]), max_size=8).map(" ".join)
INTEGERS = st.integers(-(10**30), 10**30)


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0), (10, 0), (12, 0), (13, -0.25), (14, -0.5), (15, -0.75), (16, -1), (17, -1), (1000, -1)],
)
def test_overlong_t12(length, penalty):
    assert overlong_penalty(length, 16, 4) == penalty
    assert str(overlong_penalty(length, 16, 4)) != "-0.0"


@pytest.mark.parametrize("wrong", [(5, 16, 0), (5, 16, 17), (5, 0, 1), (-1, 16, 4)])
def test_overlong_refuses_what_has_no_meaning(wrong):
    with pytest.raises(ValueError, match="must"):
        overlong_penalty(*wrong)


@given(st.integers(0, 300), st.integers(1, 200), st.data())
def test_overlong_is_bounded_and_falls(length, max_length, data):
    buffer = data.draw(st.integers(1, max_length))
    here, further = overlong_penalty(length, max_length, buffer), overlong_penalty(length + 1, max_length, buffer)
    assert -1 <= further <= here <= 0


@given(WORDS, WORDS)
def test_f1_is_symmetric_and_bounded(first, second):
    assert 0 <= token_f1(first, second) <= 1
    assert token_f1(first, second) == token_f1(second, first)
    assert token_f1(first, first) == 1


@given(WORDS)
def test_f1_ignores_articles_case_and_punctuation(text):
    assert token_f1(f"The {text.upper()} , a!", text) == 1


@pytest.mark.parametrize(
    ("answer", "label", "score"),
    [
        ("the cat sat", "cat", 2 / 3),
        ("cat cat", "cat", 2 / 3),
        ("dog", "cat", 0),
        ("", "cat", 0),
        ("the", "a", 1),
        ("Paris\u2014France", "parisfrance", 1),
        ("Rome", ["Paris", "rome"], 1),
        ("<think>Rome</think> Paris", "Paris", 1),
    ],
)
def test_f1_values(answer, label, score):
    assert f1(answer, label) == pytest.approx(score)


@given(INTEGERS, INTEGERS)
def test_last_integer_takes_the_last(first, last):
    assert last_integer(f"First {first}, then {last}.", last) == 1
    assert last_integer(f"First {first}, then {last}.", first) == float(first == last)


@given(st.integers(0, 10**30))
def test_last_integer_knows_separators_and_zeros(number):
    assert last_integer(f"It is {number:,}", number) == 1
    assert last_integer(f"It is 00{number}", f"{number:,}") == 1
    assert last_integer(f"It is -{number}", -number) == 1


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("7 + 5 = 12.", "12"),
        ("10-5", "5"),
        ("(3)-5", "5"),
        ("minus -5", "-5"),
        ("12 or 3.5", "12"),
        ("3.14.15", None),
        ("5cm", "5"),
        ("x2", "2"),
        ("1,234", "1234"),
        ("1,2", "2"),
        ("12,3456", "3456"),
        ("-0", "0"),
        ("nothing", None),
        ("9" * 6000, "9" * 6000),
        ("<think>1</think>", None),
    ],
)
def test_find_last_integer(text, found):
    assert find_last_integer(after_thinking(text)) == found


@pytest.mark.parametrize("label", ["abc", "1.5", "1,23", "--1"])
def test_last_integer_refuses_other_labels(label):
    with pytest.raises(ValueError, match="not an integer"):
        last_integer("5", label)


@pytest.mark.parametrize("grader", [exact, f1, last_integer, choice])
@pytest.mark.parametrize("label", [None, "", " \n", []])
def test_empty_labels_are_refused(grader, label):
    with pytest.raises(ValueError, match=r"label is empty|not an integer|none of the letters"):
        grader("", label)


def test_exact():
    assert exact(" Paris\n", "Paris") == 1
    assert exact("paris", "Paris") == 0
    assert exact("paris", "Paris", ignore_case=True) == 1
    assert exact("Lyon", ["Paris", "Lyon"]) == 1
    assert exact("<think>no</think>\nParis", "Paris") == 1
    assert exact("5", 5) == 1


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("C", "C"),
        ("(C)", "C"),
        ("**C**", "C"),
        ("C: Paris", "C"),
        ("C. Paris", "C"),
        ("[C]", "C"),
        (r"\boxed{C}", "C"),
        (r"\boxed{\text{C}}", "C"),
        (r"\boxed{c}", "C"),
        (r"\boxed{(C) Paris}", "C"),
        (r"A is wrong. \boxed{B} no, \boxed{C}", "C"),
        ("The answer is C.", "C"),
        ("The answer is (C), as A is wrong", "C"),
        ("Answer: c", "C"),
        ("**Answer:** C", "C"),
        ("The answer is C because option A is wrong", "C"),
        ("I take option C", "C"),
        ("A is wrong and B too.\nC", "C"),
        ("It cannot be (A), so it is (C) then", "C"),
        ("<think>the answer is A</think>C", "C"),
        ("Cats are nice", None),
        ("A cat sat", None),
        ("the answer is a number", None),
        ("Z", None),
        ("", None),
    ],
)
def test_choice(answer, letter):
    assert [label for label in "ABCDE" if choice(answer, label)] == ([letter] if letter else [])


def test_choice_labels_and_letters():
    assert choice("C", "(C) Paris") == 1
    assert choice("C", "c") == 1
    assert choice("K", "K", letters="KL") == 1
    with pytest.raises(ValueError, match="none of the letters AB"):
        choice("A", "C", letters="AB")


@given(st.text(alphabet="ab{}\\$ 1", max_size=40))
def test_boxes_of_balanced_content_are_found_whole(content):
    text = content.replace("\\", "").replace("{", "").replace("}", "")
    nested = f"{{{text}}}"
    assert last_box(rf"x \boxed{{{nested}}} y") == nested
    assert last_box(rf"\boxed{{0}} \boxed{{{text}") == "0"


@given(st.lists(st.sampled_from(["\\boxed{", "{", "}", "\\", "a", " ", "answer: ", "\n", "$", "1"])).map("".join))
def test_boxes_never_fail(text):
    boxes = find_boxes(text)
    assert boxes.content is None or boxes.content in text
    final_answer(text)


def test_unfinished_box_is_located():
    assert find_boxes(r"a \boxed{1} b \boxed{2").unfinished == len(r"a \boxed{1} b ")
    assert find_boxes(r"a \boxed{1}").unfinished is None


def test_last_tagged():
    assert last_tagged("<answer>1</answer> <answer> 2 </answer>") == "2"
    assert last_tagged("<answer>1</answer> <answer>2") == "1"
    assert last_tagged("<answer>1") is None
    assert last_tagged("</answer>") is None


@pytest.mark.parametrize("text", ["x = 5", r"\frac{1}{2}", r"3\text{ cm}", "2xy", r"\sin x", "sqrt(2)", "1, 2", "50%"])
def test_mathematics(text):
    assert is_mathematics(text)


@pytest.mark.parametrize("text", ["", "...", "it is 5", "5 apples", "the answer", "5 \u2713", "so 5"])
def test_prose(text):
    assert not is_mathematics(text)
