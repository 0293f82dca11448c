"""The `limes` command: reads the command line, resolves the settings and hands over.

Exit codes: 0 done, 2 for what the user can mend (one message, no traceback), 130 for Ctrl-C, 143 for SIGTERM.
"""

from __future__ import annotations

import difflib
import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from limes.termination import TERMINATED, sigterm_as_ctrl_c

if TYPE_CHECKING:
    from limes.config.flags import Arguments
    from limes.config.load import Resolved

INTERRUPTED = 130
HOW_TO_SET = (
    "Settings are set in a recipe under [section] or with a flag --section.name VALUE, and the flag wins. Dashes count "
    "as underscores, lists and tables are written as JSON or TOML, and `none` unsets. A path in a recipe is looked up "
    "beside the recipe first, then from the current folder."
)


@dataclass(frozen=True, slots=True)
class Command:
    """One word after `limes`."""

    usage: str
    summary: str
    body: Callable[[Arguments], int]
    sections: tuple[str, ...] = ()
    """Sections in its help; empty means all."""

    options: dict[str, tuple[bool, str]] = field(default_factory=dict)
    """Own flags: whether each takes a value, and its help."""


def main(argv: list[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    threads_before = threading.enumerate()
    with sigterm_as_ctrl_c() as was_terminated:
        code = _exit_code(sys.argv[1:] if argv is None else argv)
    if code == INTERRUPTED and was_terminated():
        code = TERMINATED
    leave_busy_threads_behind(code, threads_before)
    return code


def leave_busy_threads_behind(code: int, threads_before: Collection[threading.Thread]) -> None:
    """End the process at once where a role has not ended: the interpreter's own end could wait for it or crash.

    Args:
        threads_before: threads that were there before the command; they are others' business.
    """
    new = [thread for thread in threading.enumerate() if thread not in threads_before]
    if any(thread.name.startswith("limes-") for thread in new):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _exit_code(argv: list[str]) -> int:
    try:
        return _run(argv)
    except KeyboardInterrupt:
        print("limes: interrupted", file=sys.stderr)
        return INTERRUPTED
    except ValueError as error:
        if not _is_ours(error):
            raise
        print(f"limes: {error}", file=sys.stderr)
        return 2


def _is_ours(error: BaseException) -> bool:
    """Whether limes itself raised the error: such messages are written for users."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0] == "limes"


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("--help", "-h", "help"):
        return _print(_overview()) if argv else _print(_overview(), code=2, file=sys.stderr)
    if argv[0] in ("--version", "-V"):
        from importlib.metadata import version

        return _print(f"limes {version('limes')}")
    command = COMMANDS.get(argv[0])
    if command is None:
        near = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        raise ValueError(f"{argv[0]} is not a command; {hint}")
    from limes.config.flags import parse_arguments

    words = ["--help" if word == "-h" else word for word in argv[1:]]
    options = {name: takes_value for name, (takes_value, _) in command.options.items()}
    arguments = parse_arguments(words, options | {"help": False})
    if "help" in arguments.options:
        return _print(_help(command, arguments.positional))
    return command.body(arguments)


def _print(text: str, code: int = 0, file: object = None) -> int:
    """Print, and do not mind a reader that leaves early (`limes train --help | head`)."""
    try:
        print(text, file=file, flush=True)  # type: ignore[call-overload]
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _overview() -> str:
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"  {command.usage:<{width}}  {command.summary}" for command in COMMANDS.values()]
    return "\n".join(["limes trains language models by reinforcement learning", "", *lines, "", "limes COMMAND --help"])


def _help(command: Command, names: list[str]) -> str:
    from limes.config.schema import sections
    from limes.config.text import settings_help

    chosen = [name for name in names if name in sections()] or command.sections or tuple(sections())
    width = min(shutil.get_terminal_size().columns, 120)
    flags = {"--" + name.replace("_", "-"): text for name, (_, text) in command.options.items()}
    flags |= {"--help [SECTION ...]": "This text, or only the named sections."}
    return "\n".join(
        [
            f"{command.usage}\n\n{command.summary}",
            *(f"  {flag}\n      {text}" for flag, text in flags.items()),
            "",
            *textwrap.wrap(HOW_TO_SET, width),
            settings_help(chosen, width),
        ]
    )


def _resolve(recipe: str | None, settings: list[tuple[str, object]], *, trains: bool = True) -> Resolved:
    from limes.config.load import FLAG, resolve_pairs

    _make_importable(recipe)
    pairs = settings if trains else [*settings, ("rollout.num_rollout", 0)]
    return resolve_pairs(Path(recipe) if recipe else None, pairs, FLAG)


def _make_importable(recipe: str | None) -> None:
    """Let `module:function` settings find modules beside the recipe and in the current folder."""
    folders = [os.path.dirname(os.path.abspath(recipe))] if recipe else []
    sys.path.extend(folder for folder in [*folders, os.getcwd()] if folder not in sys.path)


def _recipe_of(arguments: Arguments, command: str) -> str | None:
    """The recipe of a command line; a line with neither recipe nor settings says which recipes there are."""
    if len(arguments.positional) > 1:
        raise ValueError(f"limes {command} takes one recipe, got {' and '.join(arguments.positional)}")
    if arguments.positional:
        return arguments.positional[0]
    if not arguments.settings:
        from limes.config.recipes import known_recipes

        recipes = ", ".join(map(str, known_recipes()))
        raise ValueError(f"limes {command} needs a recipe (a TOML file)" + (f": {recipes}" if recipes else ""))
    return None


def _say_what_takes_long() -> None:
    """Importing takes seconds, and nothing else can be said meanwhile."""
    if "torch" not in sys.modules:
        print("loading PyTorch", file=sys.stderr, flush=True)


def _train(arguments: Arguments) -> int:
    resolved = _resolve(_recipe_of(arguments, "train"), arguments.settings)
    if "dry_run" in arguments.options:
        from limes.config.batch import batch_algebra
        from limes.config.text import batch_table, settings_table

        return _print(f"{settings_table(resolved)}\n\n{batch_table(batch_algebra(resolved.config))}")
    _say_what_takes_long()
    from limes.train import run_train

    if "check" in arguments.options:
        from limes.check import check

        return check(resolved, run_train, lambda text: print(text, file=sys.stderr))
    return run_train(resolved)


def _eval(arguments: Arguments) -> int:
    resolved = _resolve(_recipe_of(arguments, "eval"), arguments.settings, trains=False)
    k = _pass_at(arguments.options.get("k"), resolved.config.eval.n_samples_per_prompt)
    _say_what_takes_long()
    from limes.evaluate import run_eval

    return run_eval(resolved, k=k)


def _pass_at(text: str | None, num_answers: int) -> tuple[int, ...]:
    """The k of pass@k: by default 1 and the number of answers a prompt gets."""
    if text is None:
        return tuple(sorted({1, num_answers}))
    if not all(part.strip().isdecimal() and int(part) > 0 for part in text.split(",")):
        raise ValueError(f'--k = "{text}": takes whole numbers of 1 or more, such as 1,4')
    k = tuple(sorted({int(part) for part in text.split(",")}))
    if k[-1] > num_answers:
        raise ValueError(
            f"--k = {k[-1]} is above eval.n_samples_per_prompt = {num_answers}; draw {k[-1]} answers or more a prompt"
        )
    return k


def _sample(arguments: Arguments) -> int:
    if len(arguments.positional) not in (1, 2):
        raise ValueError('limes sample needs a prompt in quotes: limes sample --model.path MODEL "What is 2 + 2?"')
    *recipe, prompt = arguments.positional
    resolved = _resolve(recipe[0] if recipe else None, arguments.settings, trains=False)
    _say_what_takes_long()
    from limes.sampling import run_sample

    return run_sample(resolved, prompt=prompt)


COMMANDS = {
    "train": Command(
        usage="limes train RECIPE [--section.name VALUE ...]",
        summary="Train the model of a recipe.",
        body=_train,
        options={
            "dry_run": (False, "Print every setting with its origin and the batch algebra, then stop."),
            "check": (False, "Take two small steps with a shrunken model on this machine's CPU, then stop."),
        },
    ),
    "eval": Command(
        usage="limes eval [RECIPE] [--section.name VALUE ...]",
        summary="Score a model's answers, with pass@k and intervals.",
        body=_eval,
        sections=("eval", "model", "data", "rollout", "engine", "reward", "run"),
        options={"k": (True, "The k of pass@k, such as 1,4; default: 1 and eval.n_samples_per_prompt.")},
    ),
    "sample": Command(
        usage='limes sample [RECIPE] [--section.name VALUE ...] "PROMPT"',
        summary="Print a model's answer to a prompt.",
        body=_sample,
        sections=("model", "data", "rollout", "engine", "run"),
    ),
}
