"""Readers of JSONL, Parquet and `datasets` folders: the chosen rows, in file order, as records."""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from limes.config.data import DataConfig
from limes.data.prompts import Record, near


def need_package(package: str, extra: str, what: str) -> None:
    """Refuse when an optional package is missing.

    Raises:
        ValueError: names the package and how to install it.
    """
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{what} needs the package {package}; install it with: pip install 'limes[{extra}]'")


def read_jsonl(path: Path, rows: slice) -> list[Record]:
    """Read the chosen lines; blank lines do not count.

    Raises:
        ValueError: a chosen line is no JSON object; names file and line.
    """
    with path.open("rb") as file:
        lines = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
    return [Record(f"line {number}", _json_object(line, f"{path}, line {number}")) for number, line in lines[rows]]


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        values = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text ({error})") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON ({error}); each line holds one JSON object") from error
    if not isinstance(values, dict):
        raise ValueError(f"{where}: holds a {type(values).__name__}; each line holds one JSON object")
    return values


def read_parquet(path: Path, rows: slice, data: DataConfig) -> list[Record]:
    """Read the columns that `data` names.

    Raises:
        ValueError: the file is no Parquet file, or pyarrow is missing.
    """
    need_package("pyarrow", "data", f"reading {path}")
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            columns = _wanted(file.schema_arrow.names, data)
            start, stop, _ = rows.indices(file.metadata.num_rows)
            table = file.read(columns=columns).slice(start, max(0, stop - start))
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a Parquet file ({error})") from error
    return _arrow_records(table.to_pylist(), start, data)


def read_dataset(folder: Path, rows: slice, data: DataConfig, options: dict[str, Any]) -> list[Record]:
    """Read a folder that `datasets` saved with `save_to_disk`, or one that holds data files.

    The option `split` names the split; without it the only one is taken, or `train`.

    Raises:
        ValueError: the folder is no data set, the split is unknown, or `datasets` is missing.
    """
    if unknown := set(options) - {"split"}:
        raise ValueError(f"data.source_options: a `datasets` folder knows the option split, not {', '.join(unknown)}")
    need_package("datasets", "data", f"reading the folder {folder}")
    import datasets

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bar()
    try:
        saved = (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()
        found = datasets.load_from_disk(str(folder)) if saved else datasets.load_dataset(str(folder))
    except (FileNotFoundError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{folder}: `datasets` cannot read this folder ({error})") from error
    finally:
        if shown:
            datasets.enable_progress_bar()
    table = _split(found, options.get("split"), folder) if isinstance(found, dict) else found
    start, stop, _ = rows.indices(len(table))
    if start >= stop:
        return []
    table = table.select_columns(_wanted(table.column_names, data)).select(range(start, stop))
    return _arrow_records(table, start, data)


def _split(splits: dict[str, Any], name: str | None, folder: Path) -> Any:
    if name is None:
        name = "train" if "train" in splits or len(splits) != 1 else next(iter(splits))
    if name not in splits:
        raise ValueError(f"{folder}: no split {name!r}; set data.source_options.split ({near(name, splits)})")
    return splits[name]


def _wanted(columns: list[str], data: DataConfig) -> list[str]:
    """The columns that are used; all of them when the prompt or label is missing, so that the error can list them."""
    keys = [key for key in (data.input_key, data.label_key, data.tools_key, data.metadata_key) if key]
    if data.input_key not in columns or (data.label_key and data.label_key not in columns):
        return columns
    return [key for key in keys if key in columns]


def _arrow_records(rows: Iterable[dict[str, Any]], start: int, data: DataConfig) -> list[Record]:
    records = []
    for number, values in enumerate(rows, start):
        prompt = values.get(data.input_key)
        if isinstance(prompt, list):
            # Arrow gives every message the keys of all messages, absent ones as null, and so in tools and their calls:
            # a call with an argument that is null has to be written as JSON text.
            values[data.input_key] = [_without_nulls(message) for message in prompt]
        values |= {data.tools_key: _bare(values[data.tools_key])} if data.tools_key in values else {}
        records.append(Record(f"row {number}", values))
    return records


def _without_nulls(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    return kept | ({"tool_calls": _bare(kept["tool_calls"])} if "tool_calls" in kept else {})


def _bare(value: Any) -> Any:
    """The value without nulls at any depth."""
    if isinstance(value, dict):
        return {key: _bare(entry) for key, entry in value.items() if entry is not None}
    return [_bare(entry) for entry in value] if isinstance(value, list) else value


def near_files(path: Path) -> str:
    """A hint at files beside a missing one that are named much like it."""
    if not path.parent.is_dir():
        return f"; there is no folder {path.parent} (here is {Path.cwd()})"
    close = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(str(path.parent / name) for name in close)}?" if close else ""
