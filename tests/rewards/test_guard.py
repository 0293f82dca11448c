from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limes.rewards.guard import SYMPY_NAMES, Refused, arithmetic_eval, check_expression

NUMBERS = st.integers(-99, 99).map(str) | st.floats(0, 9, allow_subnormal=False).map(repr)
FORMULAS = st.recursive(
    NUMBERS,
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(lambda x: f"({x[0]} {x[1]} {x[2]})"),
    max_leaves=8,
)
ATTACKS = [
    "__import__('os')",
    "open('x', 'w')",
    "().__class__",
    "(1).real",
    "[x for x in (1,)]",
    "(lambda: 1)()",
    "f'{1}'",
    "x := 1",
    "'a'.join",
    "[1][0]",
    "print",
    "eval('1')",
    "1 if 2 else 3",
    "yield 1",
]


@given(FORMULAS)
def test_arithmetic_is_what_python_makes_of_it(formula):
    assert arithmetic_eval(formula) == eval(formula)


@pytest.mark.parametrize("source", ["[1, 2]", "{'a': (1, -2)}", "'text'", " 3 ", "True", "{1, 2}", "[[0, 1], [2, 3]]"])
def test_literals(source):
    assert arithmetic_eval(source) == eval(source.strip())


@pytest.mark.parametrize("source", ATTACKS)
def test_anything_more_is_refused(source):
    with pytest.raises((Refused, SyntaxError)):
        arithmetic_eval(source)


@pytest.mark.parametrize(
    "source", [*ATTACKS, "Integer(1).func", "S('open')", "sympify('1')", "lambdify(1)", "Integer(1)(2)"]
)
def test_anything_more_is_refused_on_the_way_through_sympy(source):
    with pytest.raises((Refused, SyntaxError)):
        check_expression(source, SYMPY_NAMES)


def test_what_sympy_makes_of_formulas_is_accepted():
    check_expression("Integer (2 )*Symbol ('x' )**Integer (2 )+sqrt (Float ('0.5' ))/pi ", SYMPY_NAMES)


LOCKED = """
import os, socket, subprocess, sys
from limes.rewards import guard
folder = sys.argv[1]
guard.lock_down()
acts = {
    "write": lambda: open(folder + "/made", "w"),
    "append": lambda: open(folder + "/made", "a"),
    "update": lambda: open(folder + "/here", "r+"),
    "create": lambda: os.open(folder + "/made", os.O_CREAT | os.O_RDWR),
    "remove": lambda: os.remove(folder + "/here"),
    "rename": lambda: os.rename(folder + "/here", folder + "/made"),
    "mkdir": lambda: os.mkdir(folder + "/made"),
    "system": lambda: os.system("touch " + folder + "/made"),
    "popen": lambda: subprocess.Popen(["touch", folder + "/made"]),
    "fork": lambda: os.fork(),
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "socket": lambda: socket.create_connection(("127.0.0.1", 9)),
    "kill": lambda: os.kill(os.getppid(), 0),
    "ctypes": lambda: __import__("ctypes").CDLL(None),
}
for name, act in acts.items():
    try:
        act()
        print("did", name)
    except guard.Refused:
        pass
print(open(folder + "/here").read(), sum(eval("range(3)")), __import__("fractions").Fraction(1, 2))
"""


def test_locked_process_can_only_compute_and_read(tmp_path):
    (tmp_path / "here").write_text("kept")
    done = subprocess.run(
        [sys.executable, "-c", LOCKED, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "kept 3 1/2\n"
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert (tmp_path / "here").read_text() == "kept"
