"""What keeps a worker process harmless while it handles model output.

Two walls. First, text that would reach Python's `eval` through sympy or a verifier must be an expression of literals,
arithmetic and a few mathematical functions: no attributes, no other names. Second, once a worker has loaded its
libraries, an audit hook refuses writing files, starting processes, sockets and the like, whoever asks.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import os
import re
import resource
import sys
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

ARITHMETIC = (
    ast.Expression,
    ast.Constant,
    ast.BinOp,
    ast.UnaryOp,
    ast.operator,
    ast.unaryop,
    ast.Tuple,
    ast.List,
    ast.Set,
    ast.Dict,
    ast.expr_context,
)
SYMPY_NAMES = frozenset(
    re.findall(
        r"\w+",
        """Integer Float Rational Symbol Add Mul Pow sqrt cbrt root exp log ln sin cos tan cot sec csc asin acos atan
        sinh cosh tanh asinh acosh atanh Abs abs floor ceiling factorial Min Max pi E I oo""",
    )
)
MAX_FILE_BYTES = 2**20
WRITING_MODES = frozenset("wax+")
WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
REFUSED = (
    "os.",
    "subprocess.",
    "socket.",
    "shutil.",
    "ctypes.",
    "pty.",
    "fcntl.",
    "tempfile.",
    "sqlite3.",
    "urllib.",
    "http.",
    "webbrowser.",
    "signal.",
    "resource.",
    "code.__new__",
)
READING = frozenset({"os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.getxattr", "os.listxattr"})


class Refused(PermissionError):
    """Model output tried to do something other than compute."""


def check_expression(source: str, names: Collection[str]) -> None:
    """Accept only literals, containers, arithmetic, and the given names, alone or called.

    Raises:
        Refused: the source is anything more.
        SyntaxError: it is no Python expression.
    """
    for node in ast.walk(ast.parse(source.strip(), mode="eval")):
        if isinstance(node, ast.Name):
            if node.id not in names:
                raise Refused(f"the name {node.id!r} in an answer")
        elif isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name) or node.keywords:
                raise Refused("a call in an answer")
        elif not isinstance(node, ARITHMETIC):
            raise Refused(f"{type(node).__name__} in an answer")


def guard_sympy() -> None:
    """Put the expression check before the `eval` inside sympy's parser.

    Raises:
        RuntimeError: this sympy does not take the check.
    """
    sympy_parser = importlib.import_module("sympy.parsing.sympy_parser")
    evaluate = sympy_parser.eval_expr

    def guarded(code: Any, local_dict: dict[str, Any], global_dict: dict[str, Any]) -> Any:
        if not isinstance(code, str):
            raise Refused("compiled code in an answer")
        check_expression(code, SYMPY_NAMES | local_dict.keys())
        return evaluate(code, local_dict, global_dict)

    vars(sympy_parser)["eval_expr"] = guarded
    try:
        sympy_parser.parse_expr("open('/dev/null')")
    except Refused:
        return
    raise RuntimeError("the check of sympy's parser does not take hold; this version of sympy is not supported")


def arithmetic_eval(
    source: str, global_dict: dict[str, Any] | None = None, local_dict: Mapping[str, Any] | None = None
) -> Any:
    """`eval` for literals and arithmetic only; stands in for `eval` inside verifiers."""
    check_expression(source, ())
    return builtins.eval(compile(source.strip(), "<answer>", "eval"), {"__builtins__": {}}, {})


def limit_resources(megabytes: int) -> None:
    """Let this process grow by so much beyond what it has now; more is a MemoryError (Linux only). No big files, no
    core dumps."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    if sys.platform == "linux":
        limit = address_space() + megabytes * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def address_space() -> int:
    """Bytes of address space this process has; 0 where unknown."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def lock_down() -> None:
    """Refuse everything but computing from here on, for good."""
    sys.dont_write_bytecode = True
    sys.addaudithook(_refuse)


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        _, mode, flags = args
        if (isinstance(mode, str) and WRITING_MODES & set(mode)) or (isinstance(flags, int) and flags & WRITING_FLAGS):
            _stop(event)
    elif event.startswith(REFUSED) and event not in READING:
        _stop(event)


def _stop(event: str) -> NoReturn:
    raise Refused(f"{event} while handling an answer")
