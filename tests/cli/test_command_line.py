"""The `limes` command: what it prints, what it hands over and how it exits."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import limes
from limes.cli import main
from limes.config import load_config
from limes.config.schema import leaves, sections

RECIPE = "[rollout]\nnum_rollout = 3\nbatch_size = 4\n"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "recipes").mkdir()
    path = tmp_path / "recipes" / "quick.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def body(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list]:
    """Stand in for a lazily imported body: returns the list of its calls."""

    def install(module: str, function: str, result: int | BaseException = 0) -> list:
        calls: list = []

        def run(*args: Any, **kwargs: Any) -> int:
            calls.append((args, kwargs))
            if isinstance(result, BaseException):
                raise result
            return result

        stand_in = ModuleType(module)
        setattr(stand_in, function, run)
        monkeypatch.setitem(sys.modules, module, stand_in)
        return calls

    return install


def test_train_hands_over_resolved_settings(recipe: Path, body: Callable[..., list]) -> None:
    calls = body("limes.train", "run_train", 7)
    assert main(["train", "--rollout.batch-size", "8", "recipes/quick.toml", "--trainer.lr=1e-5"]) == 7
    ((resolved,), _) = calls[0]
    assert resolved.config == load_config(recipe, {"rollout.batch_size": 8, "trainer.lr": 1e-5})
    assert resolved.origins["rollout.batch_size"] == "command line"
    assert resolved.origins["rollout.num_rollout"] == "recipe file"
    assert resolved.recipe == Path("recipes/quick.toml")


def test_modules_beside_the_recipe_and_here_become_importable(recipe: Path, body: Callable[..., list]) -> None:
    body("limes.train", "run_train")
    main(["train", "recipes/quick.toml"])
    assert str(recipe.parent) in sys.path
    assert str(recipe.parent.parent) in sys.path
    length = len(sys.path)
    main(["train", "recipes/quick.toml"])
    assert len(sys.path) == length


def test_train_needs_a_recipe_or_settings(recipe: Path, body: Callable[..., list], capsys: Any) -> None:
    assert main(["train"]) == 2
    assert "limes train needs a recipe (a TOML file): recipes/quick.toml" in capsys.readouterr().err
    calls = body("limes.train", "run_train")
    assert main(["train", "--rollout.num_rollout", "2"]) == 0
    assert calls[0][0][0].config.rollout.num_rollout == 2


def test_eval_needs_no_length_of_training(recipe: Path, body: Callable[..., list]) -> None:
    calls = body("limes.evaluate", "run_eval")
    assert main(["eval", "--model.path", "m", "--eval.n_samples_per_prompt", "4", "--rollout.top_p", "0.9"]) == 0
    assert main(["eval", "recipes/quick.toml", "--eval.n_samples_per_prompt=4", "--k", "4,2"]) == 0
    assert [kwargs for _, kwargs in calls] == [{"k": (1, 4)}, {"k": (2, 4)}]
    assert calls[0][0][0].config.model.path == "m"
    assert [args[0].config.rollout.num_rollout for args, _ in calls] == [0, 0]


def test_sample_takes_a_prompt_and_maybe_a_recipe(recipe: Path, body: Callable[..., list]) -> None:
    calls = body("limes.sampling", "run_sample")
    assert main(["sample", "--model.path", "m", "-3 + 4 = ?"]) == 0
    assert main(["sample", "recipes/quick.toml", "--", "--what"]) == 0
    assert [kwargs["prompt"] for _, kwargs in calls] == ["-3 + 4 = ?", "--what"]
    assert [args[0].recipe for args, _ in calls] == [None, Path("recipes/quick.toml")]


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["trian"], "trian is not a command; did you mean train?"),
        (["xyz"], "there are train, eval, sample"),
        (["train", "recipes/quik.toml"], "no such file; did you mean recipes/quick.toml?"),
        (["train", "recipes/quick.toml", "more"], "takes one recipe, got recipes/quick.toml and more"),
        (["train", "recipes/quick.toml", "--dry"], "--dry is not a flag; did you mean --dry-run?"),
        (["train", "recipes/quick.toml", "--dry-run=3"], '--dry-run takes no value, got "3"'),
        (["train", "recipes/quick.toml", "--lr", "1"], "--lr is not a flag; did you mean --trainer.lr or --critic.lr?"),
        (["train", "recipes/quick.toml", "--rollout", "1"], "rollout is a section, not a setting"),
        (
            ["train", "recipes/quick.toml", "--rollout.bach_size", "1"],
            "did you mean rollout.batch_size? (command line)",
        ),
        (["train", "recipes/quick.toml", "--trainer.num_steps_per_rollout", "5"], "does not divide the 32 samples"),
        (["eval"], "limes eval needs a recipe"),
        (["eval", "recipes/quick.toml", "--k"], "--k needs a value"),
        (["eval", "recipes/quick.toml", "--k", "0"], '--k = "0": takes whole numbers'),
        (["eval", "recipes/quick.toml", "--k", "8"], "--k = 8 is above eval.n_samples_per_prompt = 1"),
        (["sample"], "limes sample needs a prompt in quotes"),
    ],
)
@pytest.mark.usefixtures("recipe")
def test_user_errors_are_one_message_and_exit_2(words: list[str], fragment: str, capsys: Any) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("limes: ")
    assert fragment in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.usefixtures("recipe")
def test_foreign_errors_keep_their_traceback(body: Callable[..., list]) -> None:
    body("limes.train", "run_train", ValueError("from somewhere else"))
    with pytest.raises(ValueError, match="somewhere else"):
        main(["train", "recipes/quick.toml"])


@pytest.mark.usefixtures("recipe")
def test_ctrl_c_is_one_line_and_130(body: Callable[..., list], capsys: Any) -> None:
    body("limes.train", "run_train", KeyboardInterrupt())
    assert main(["train", "recipes/quick.toml"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "limes: interrupted"


@pytest.mark.usefixtures("recipe")
def test_dry_run_shows_values_origins_and_algebra(capsys: Any) -> None:
    assert main(["train", "recipes/quick.toml", "--dry-run", "--trainer.num_steps_per_rollout", "2"]) == 0
    lines = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    expected = {
        "rollout.batch_size 4 recipe file",
        "rollout.n_samples_per_prompt 8 default",
        "trainer.num_steps_per_rollout 2 command line",
        "rollout.over_sampling_batch_size 4 derived: rollout.batch_size",
        "engine.max_context_len at start derived: the model's limit",
        "samples a rollout 32 4 prompts x 8 answers",
        "samples a step 16 32 samples / 2 steps",
        "optimizer steps 6 2 a rollout",
    }
    assert expected <= lines
    assert all(any(line.startswith(f"{path} ") for line in lines) for path in leaves())


@pytest.mark.parametrize("command", ["train", "eval", "sample"])
def test_help_covers_every_setting_of_its_sections(command: str, capsys: Any) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    shown = [name for name in sections() if f"\n[{name}] " in text]
    assert shown == list(sections()) or command != "train"
    for leaf in leaves().values():
        assert (f"  --{leaf.path} " in text) == (leaf.path.split(".")[0] in shown)
    words = " ".join(text.split())
    assert all(leaf.doc in words for leaf in leaves().values() if leaf.path.split(".")[0] in shown)


def test_help_of_one_section(capsys: Any) -> None:
    assert main(["train", "--help", "rollout"]) == 0
    text = capsys.readouterr().out
    assert "--rollout.batch_size  (default: 8)" in text
    assert "--trainer.lr" not in text


def test_overview_and_version(capsys: Any) -> None:
    assert main(["--help"]) == 0
    assert "limes train RECIPE" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("limes 0.")


HEAVY = ("torch", "transformers", "numpy", "rich", "matplotlib")


@pytest.mark.parametrize(
    "words", [["--help"], ["train", "--help"], ["train", "recipes/quick.toml", "--dry-run"], ["--version"]]
)
@pytest.mark.usefixtures("recipe")
def test_help_and_dry_run_import_nothing_heavy(words: list[str]) -> None:
    code = f"import sys; from limes.cli import main; assert main({words}) == 0; print([*sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not [name for name in HEAVY if f"'{name}'" in done.stderr]


def test_help_into_a_closed_pipe_is_silent() -> None:
    command = f'{sys.executable} -c \'import limes.cli, sys; sys.exit(limes.cli.main(["train", "--help"]))\' | true'
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_package_exports_are_lazy() -> None:
    code = (
        "import limes, sys; assert 'pydantic' not in sys.modules; limes.load_config; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert limes.load_config is load_config
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = limes.nothing


def test_train_is_a_module_and_a_function(body: Callable[..., list], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = body("limes.train", "run_train", 5)
    monkeypatch.setattr(limes, "train", sys.modules["limes.train"], raising=False)
    config = load_config(None, {"rollout.num_rollout": 1})
    assert limes.train(config) == 5
    assert calls[0][0][0].config is config
