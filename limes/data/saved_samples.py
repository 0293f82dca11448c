"""A put-back sample as plain JSON data. What it has from its prompt row is not stored but taken from the row again,
so that tuples and the like in the row's metadata come back as they were."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

from limes.data.canonical import canonical
from limes.data.encode import EncodedPrompt
from limes.records import Sample, Status

FROM_ROW = ("prompt", "label", "metadata")
PLAIN = tuple(field.name for field in dataclasses.fields(Sample) if field.name not in FROM_ROW)


def sample_state(sample: Sample, row: EncodedPrompt) -> dict[str, Any]:
    """Everything in `sample` that `row` does not hold.

    Raises:
        ValueError: metadata added to the sample is not plain JSON data.
    """
    state = {name: getattr(sample, name) for name in PLAIN} | {"status": sample.status.value}
    for name in ("prompt", "label"):
        if not _same(getattr(sample, name), getattr(row, name)):
            state[name] = getattr(sample, name)
    state["metadata"] = {
        key: value
        for key, value in sample.metadata.items()
        if key not in row.metadata or not _same(value, row.metadata[key])
    }
    state["dropped_metadata"] = [key for key in row.metadata if key not in sample.metadata]
    try:
        # Through text, so that the state is a snapshot and not a view of a sample that may grow on.
        plain: dict[str, Any] = json.loads(json.dumps(state))
    except TypeError as error:
        raise ValueError(
            f"sample {sample.index} cannot be saved: {error}; what a rollout puts into reward, label or metadata must "
            "be plain JSON data (text, numbers, lists, dicts)"
        ) from error
    return plain


def sample_from_state(state: dict[str, Any], row: EncodedPrompt) -> Sample:
    """The sample that `sample_state` saw."""
    metadata = copy.deepcopy(row.metadata) | copy.deepcopy(state["metadata"])
    for key in state["dropped_metadata"]:
        del metadata[key]
    values = {name: copy.deepcopy(state[name]) for name in PLAIN} | {"status": Status(state["status"])}
    return Sample(
        **values,
        prompt=copy.deepcopy(state.get("prompt", row.prompt)),
        label=copy.deepcopy(state.get("label", row.label)),
        metadata=metadata,
    )


def _same(left: Any, right: Any) -> bool:
    return canonical(left) == canonical(right)
