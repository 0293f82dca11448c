"""The run folder is always fresh."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from limes.config.run import RunConfig
from limes.run import RunFolder
from limes.run.files import atomic_file


def test_default_names_never_meet(tmp_path: Path):
    run = RunConfig(dir=str(tmp_path / "deep" / "runs"))
    folders = [RunFolder.create(run, "quick start!") for _ in range(4)]
    assert len({folder.path for folder in folders}) == 4
    for folder in folders:
        assert folder.name.startswith("quick-start-")
        assert sorted(path.name for path in folder.path.iterdir()) == ["checkpoints", "rollouts"]


def test_leftovers_of_an_old_run_are_refused_and_kept(tmp_path: Path):
    old = tmp_path / "mine" / "rollouts"
    old.mkdir(parents=True)
    (old / "000000.samples.jsonl").write_text("old\n")
    with pytest.raises(ValueError, match=r"run\.name = 'mine'.*exists already.*another run\.name"):
        RunFolder.create(RunConfig(dir=str(tmp_path), name="mine"), "x")
    assert (old / "000000.samples.jsonl").read_text() == "old\n"
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["rollouts"]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b", "../up"])
def test_names_that_are_no_folder_name(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match=r"run\.name"):
        RunFolder.create(RunConfig(dir=str(tmp_path / "runs"), name=name), "x")
    assert list(tmp_path.rglob("checkpoints")) == []


def test_place_that_cannot_hold_folders(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"run\.dir = .*file.*another run\.dir"):
        RunFolder.create(RunConfig(dir=str(tmp_path / "file")), "x")


def test_config_is_written(tmp_path: Path):
    folder = RunFolder.create(RunConfig(dir=str(tmp_path), name="mine"), "x")
    assert folder.write_config('a = "b"\n').read_text() == 'a = "b"\n'
    assert folder.config == tmp_path / "mine" / "config.toml"


def test_atomic_file_keeps_the_old_one_when_the_block_fails(tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("old")

    def write_half() -> None:
        with atomic_file(path) as file:
            file.write("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_importing_the_room_is_light():
    heavy = "torch", "matplotlib", "wandb", "trackio", "tensorboard"
    program = f"import sys, limes.run; print([name for name in {heavy!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
