"""Where prompts come from: files, `datasets` folders and generated tasks, with an optional row slice."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from limes.config.data import DataConfig
from limes.data import gym, tables
from limes.data.prompts import PromptSet, Record, prompt_set, rows_from_records

Progress = Callable[[int, int], None]
"""Told (done, total) while something long goes on."""

SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]", re.DOTALL)
GYM = "reasoning_gym:"


def load_prompts(
    data: DataConfig,
    prompt_data: str | None = None,
    source_options: Mapping[str, Any] | None = None,
    *,
    progress: Progress | None = None,
) -> PromptSet:
    """Read the prompts that `data.prompt_data`, or `prompt_data` in its place, names.

    Args:
        data: which columns hold what, and the options of a generated source.
        prompt_data: another source, such as the evaluation's, written in the same way.
        source_options: options of that source; default `data.source_options` for a generated source.
        progress: called with (rows done, rows in all) while a task generates its rows.

    Raises:
        ValueError: the source is missing, empty or malformed; names the place and the fix.
    """
    name = data.prompt_data if prompt_data is None else prompt_data
    own_options = prompt_data is None or source_options is not None
    options = dict(data.source_options if source_options is None else source_options)
    path, rows = split_slice(name)
    if path.startswith(GYM):
        found = gym.load_task(path.removeprefix(GYM), options, rows, progress)
    else:
        # Options that belong to the training source say nothing about a file named in its place.
        records = _records(path, rows, data, options if own_options else {})
        found = rows_from_records(records, data, path)
    if not found:
        raise ValueError(
            f"data.prompt_data = {name} holds no rows" + ("; widen the slice" if rows != slice(None) else "")
        )
    return prompt_set(name, found)


def split_slice(name: str) -> tuple[str, slice]:
    """`train.jsonl@[0:100]` is a path and a slice with Python's meaning: ends may be open or count from the end.

    Raises:
        ValueError: what follows `@[` is no slice.
    """
    if match := SLICE.fullmatch(name):
        start, stop = (int(end) if end not in ("", "-") else None for end in match.group("start", "stop"))
        if "-" not in match.group("start", "stop"):
            return match["path"], slice(start, stop)
    if "@[" in name:
        raise ValueError(f"data.prompt_data = {name}: a row slice is written @[start:stop], as in @[0:100] or @[-20:]")
    return name, slice(None)


def _records(name: str, rows: slice, data: DataConfig, options: dict[str, Any]) -> list[Record]:
    path = Path(name).expanduser()
    if not path.exists():
        near = tables.near_files(path)
        raise ValueError(f"data.prompt_data = {name}: no such file or folder{near}")
    if path.is_dir():
        return tables.read_dataset(path, rows, data, options)
    if options:
        raise ValueError(f"data.source_options = {options}: a file takes no options; they are for generated sources")
    if path.suffix in (".jsonl", ".ndjson"):
        return tables.read_jsonl(path, rows)
    if path.suffix == ".parquet":
        return tables.read_parquet(path, rows, data)
    raise ValueError(
        f"data.prompt_data = {name}: files end in .jsonl (one JSON object a line) or .parquet, "
        f"not {path.suffix or 'nothing'}; other sources are a `datasets` folder and {GYM}<task>"
    )
