"""Prompt rows: what a source yields, checked, with a fingerprint of its content."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from limes.config.data import DataConfig
from limes.data.canonical import canonical
from limes.records import Message


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt with what its grader needs."""

    prompt: str | list[Message]
    label: Any
    metadata: dict[str, Any]


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
        digest.update(canonical([row.prompt, row.label, row.metadata]).encode("utf-8", "surrogatepass"))
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
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
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
