"""The rules of the house, and documents that stay true."""

import ast
import importlib
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import save_tiny

import limes
from limes.config import Config, load_config
from limes.config.base import Section
from limes.config.schema import leaves, sections

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "limes").rglob("*.py"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
RECIPES = sorted((ROOT / "recipes").rglob("*.toml"))

RANKS = {
    **dict.fromkeys(["config", "records"], 0),
    **dict.fromkeys(["algorithms", "data", "rewards", "models"], 1),
    **dict.fromkeys(["engine", "weights", "run"], 2),
    "rollout": 3,
    "training": 4,
    "cluster": 5,
    **dict.fromkeys(["view", "cli"], 7),
}
BESIDE_TRAIN = 6  # train, train_async and the modules of the top level that serve them
MAX_FILE, MAX_FUNCTION = 400, 80

CODE_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED_BLOCK = re.compile(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARKED = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
FLAG = re.compile(r"(?<![\w-])--([a-z]+\.[a-z_0-9-]+)")
FILE_ENDS = (".json", ".jsonl", ".toml", ".png", ".safetensors", ".py")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def imports_of(path: Path) -> Iterator[str]:
    """Dotted names of ours that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(text_of(path))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}, line {node.lineno}: imports are absolute"
            names = [f"limes.{a.name}" for a in node.names] if node.module == "limes" else [str(node.module)]
        else:
            continue
        yield from (name for name in names if name.startswith("limes."))


def words(*command: str) -> subprocess.CompletedProcess[str]:
    """Run `limes` in a process of its own."""
    return subprocess.run([sys.executable, "-m", "limes", *command], capture_output=True, text=True, check=False)


# The code


def test_a_room_imports_only_from_rooms_before_it() -> None:
    wrong = []
    for path in SOURCES:
        room = room_of(path.relative_to(ROOT / "limes").parts[0])
        for imported in imports_of(path):
            other = room_of(imported.split(".")[1])
            if not may_import(room, other):
                wrong.append(f"{name_of(path)} imports {imported}")
    assert wrong == []


def room_of(name: str) -> str:
    return name.removesuffix(".py")


def may_import(room: str, other: str) -> bool:
    rank, other_rank = RANKS.get(room, BESIDE_TRAIN), RANKS.get(other, BESIDE_TRAIN)
    if room in (other, "__init__", "__main__"):
        return True
    # algorithms knows nothing of ours; modules beside train may use one another
    return room != "algorithms" and (other_rank < rank or other_rank == rank == BESIDE_TRAIN)


def test_every_room_has_its_place_in_the_chain() -> None:
    rooms = {path.name for path in (ROOT / "limes").iterdir() if any(path.glob("*.py"))}
    assert rooms <= set(RANKS)


def test_files_are_ascii_and_small_and_functions_fit_a_screen() -> None:
    wrong = []
    for path in SOURCES:
        text = text_of(path)
        if not text.isascii():
            wrong.append(f"{name_of(path)}: not ASCII")
        if (num := len(text.splitlines())) > MAX_FILE:
            wrong.append(f"{name_of(path)}: {num} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num = (node.end_lineno or node.lineno) - node.lineno + 1
                if num > MAX_FUNCTION:
                    wrong.append(f"{name_of(path)}, {node.name}: {num} lines")
    assert wrong == []


def test_importing_limes_and_its_settings_is_light() -> None:
    code = "import limes, limes.config, limes.cli, sys; print(*{'torch', 'transformers', 'numpy'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


# Settings and recipes


def test_every_setting_says_what_it_is() -> None:
    for path, leaf in leaves().items():
        assert leaf.doc.endswith("."), f"{path}: {leaf.doc!r}"
    for module in pkgutil.iter_modules(importlib.import_module("limes.config").__path__, "limes.config."):
        importlib.import_module(module.name)
    kinds = list(Section.__subclasses__())
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
        assert kind.__doc__, kind
        undescribed = [name for name, field in kind.model_fields.items() if not field.description]
        assert not undescribed or kind is Config, f"{kind.__name__}: {undescribed}"


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_recipes_load_and_their_data_is_there(path: Path) -> None:
    data = load_config(path).data.prompt_data
    assert Path(data.partition("@[")[0]).is_file() or data.startswith("reasoning_gym:")


# Documents


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_documents_name_files_that_exist(path: Path) -> None:
    text = text_of(path)
    ours = tuple(entry.name + "/" for entry in ROOT.iterdir() if entry.is_dir() and entry.name != "runs")
    marked = [
        word
        for word in MARKED.findall(CODE_BLOCK.sub("", text))
        if word.startswith(ours) and not set(word) & set(" <*")
    ]
    for name in marked:
        assert (ROOT / name.partition("::")[0]).exists(), f"`{name}`"
    for target in LINK.findall(text):
        assert "://" in target or (path.parent / target).exists(), f"({target})"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_documents_name_python_that_exists(path: Path) -> None:
    for name in re.findall(r"`(limes(?:\.\w+)+)(?:\([^`]*\))?`", text_of(path)):
        found = limes
        for part in name.split(".")[1:]:
            if not hasattr(found, part):
                importlib.import_module(f"{found.__name__}.{part}")
            found = getattr(found, part)


def test_the_algorithms_of_the_architecture_exist() -> None:
    from limes import algorithms

    named = re.findall(r"`(\w+)\.(\w+)\(", text_of(ROOT / "docs" / "architecture.md"))
    ours = [(module, name) for module, name in named if hasattr(algorithms, module)]
    assert len(ours) > 10
    assert [f"{module}.{name}" for module, name in ours if not hasattr(getattr(algorithms, module), name)] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_documents_name_settings_that_exist(path: Path) -> None:
    text = text_of(path)
    named = {flag.replace("-", "_") for flag in FLAG.findall(text)}
    for word in MARKED.findall(text):
        section, dot, leaf = word.partition(".")
        if dot and section in sections() and leaf.isidentifier() and not word.endswith(FILE_ENDS):
            named.add(word)
    assert sorted(named - set(leaves())) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_commands_in_documents_are_understood(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for language, block in CODE_BLOCK.findall(text_of(path)):
        for line in block.splitlines() if language == "bash" else []:
            if line.startswith("limes train recipes/"):
                command = line.partition("#")[0].removesuffix("--dry-run").split()[1:]
                result = words(*command, *([] if "--help" in command else ["--dry-run"]))
                assert result.returncode == 0, f"{line}\n{result.stderr}"


def test_the_architecture_names_every_room_and_section() -> None:
    text = text_of(ROOT / "docs" / "architecture.md")
    settings = text.partition("\n## Settings\n")[2].partition("\n## ")[0]
    assert [name for name in sections() if f"`{name}`" not in settings] == []
    for path in (ROOT / "limes").iterdir():
        if path.suffix == ".py" and not path.name.startswith("__"):
            assert re.search(rf"^  {path.name} ", text, re.MULTILINE), path.name
        elif any(path.glob("*.py")):
            assert re.search(rf"^  {path.name}/ ", text, re.MULTILINE), path.name


def test_ci_runs_the_tests_as_the_readme_does() -> None:
    commands = [line for _, block in CODE_BLOCK.findall(text_of(ROOT / "README.md")) for line in block.splitlines()]
    assert text_of(ROOT / ".ci" / "run").rstrip().splitlines()[-1] in commands


@pytest.mark.slow
def test_the_example_of_the_readme_trains(tmp_path: Path) -> None:
    files = dict(NAMED_BLOCK.findall(text_of(ROOT / "README.md")))
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (recipe,) = (name for name in files if name.endswith(".toml"))
    model = save_tiny(tmp_path / "model")
    settings = {"model.path": model, "rollout.num_rollout": 1, "run.dir": tmp_path / "runs", "run.name": "a"}
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    result = words("train", str(tmp_path / recipe), *flags)
    assert result.returncode == 0, result.stderr
    samples = (tmp_path / "runs" / "a" / "rollouts" / "000000.samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert samples
    for line in samples:
        sample = json.loads(line)
        assert sample["error"] is None, sample["error"]
        assert sample["reward"] is not None
