"""Prompt rows: what a source yields, checked, with a fingerprint of its content."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from limes.config.data import DataConfig
from limes.data.canonical import canonical
from limes.records import Message


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt with what its grader needs, and the tools that the answer may call."""

    prompt: str | list[Message]
    label: Any
    metadata: dict[str, Any]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Rows in the order of their source. `fingerprint` is a hash of their content: equal rows, equal fingerprint,
    wherever they lie; another slice, order, option or column gives another one."""

    rows: Sequence[Row]
    name: str
    fingerprint: str

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class Record:
    """A raw row and the words that say where it stands, such as `line 3`."""

    where: str
    values: Mapping[str, Any]


def prompt_set(name: str, rows: Sequence[Row]) -> PromptSet:
    """Name and fingerprint `rows`."""
    digest = hashlib.sha256()
    for row in rows:
        content = [row.prompt, row.label, row.metadata, *([row.tools] if row.tools else [])]
        digest.update(canonical(content).encode("utf-8", "surrogatepass"))
        digest.update(b"\n")
    return PromptSet(rows=rows, name=name, fingerprint=digest.hexdigest()[:16])


def rows_from_records(records: Iterable[Record], data: DataConfig, name: str) -> list[Row]:
    """Pick and check the columns that `data` names.

    Raises:
        ValueError: names source, row, column and fix.
    """
    rows, columns, label_seen = [], dict[str, None](), False
    for record in records:
        columns.update(dict.fromkeys(record.values))
        if data.input_key not in record.values:
            raise ValueError(_missing_column(name, record.where, "input_key", data.input_key, record.values))
        label_seen |= data.label_key in record.values
        rows.append(
            Row(
                prompt=check_prompt(record.values[data.input_key], f"{name}, {record.where}, column {data.input_key}"),
                label=record.values.get(data.label_key) if data.label_key else None,
                metadata=_metadata(record, data.metadata_key, name),
                tools=_tools(record, data.tools_key, name),
            )
        )
    if rows and data.label_key and not label_seen:
        raise ValueError(
            _missing_column(name, "every row", "label_key", data.label_key, columns)
            + '; data.label_key = "" says that this data has no labels'
        )
    return rows


def check_prompt(prompt: Any, where: str) -> str | list[Message]:
    """A prompt is text or a list of chat messages, and never empty.

    Raises:
        ValueError: names the place and what stands there.
    """
    if isinstance(prompt, str) and prompt:
        return prompt
    if not prompt and isinstance(prompt, str | list | None):
        raise ValueError(f"{where}: the prompt is empty; leave the row out or give it a prompt")
    if not isinstance(prompt, list):
        raise ValueError(f"{where}: a prompt is text or a list of chat messages, not {_kind(prompt)}")
    for message in prompt:
        whole = isinstance(message, dict) and ("content" in message or "tool_calls" in message)
        if not whole or not isinstance(message.get("role"), str):
            raise ValueError(f"{where}: a chat message is an object with role and content, not {_short(message)}")
    return prompt


def near(name: str, choices: Iterable[str], *, most: int = 12) -> str:
    """`did you mean ...?` where something is close, else the first of what there is."""
    names = sorted(choices)
    if close := difflib.get_close_matches(name, names, n=3, cutoff=0.5):
        return f"did you mean {' or '.join(close)}?"
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return f"there is: {', '.join(names[:most]) or 'nothing'}{more}"


def _metadata(record: Record, key: str, name: str) -> dict[str, Any]:
    metadata = record.values.get(key)
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise ValueError(
            f"{name}, {record.where}: column {key} holds {_kind(metadata)}, not an object; "
            "fix the row or name another column with data.metadata_key"
        )
    return metadata


def _tools(record: Record, key: str, name: str) -> list[dict[str, Any]] | None:
    """The tools of a row; text is taken as JSON, which keeps Parquet from mixing the schemas of different tools."""
    found = record.values.get(key)
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name}, {record.where}: column {key} is not valid JSON ({error})") from error
    if not found:
        return None
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise ValueError(
            f"{name}, {record.where}: column {key} holds {_kind(found)}, not a list of tools; "
            "fix the row or name another column with data.tools_key"
        )
    return found


def _missing_column(name: str, where: str, setting: str, key: str, columns: Iterable[str]) -> str:
    columns = list(columns)
    listed = ", ".join(columns) or "none"
    hint = f" ({near(key, columns)})" if difflib.get_close_matches(key, columns, cutoff=0.5) else ""
    return (
        f"{name}, {where}: no column {key!r}, which data.{setting} names{hint}; "
        f"columns: {listed}; set data.{setting} to one of them"
    )


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {_short(value)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
