"""The base class of every settings section and the type of free-form options."""

import datetime
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict


class Section(BaseModel):
    """One table of the settings: frozen, strictly typed, unknown keys refused, field docstrings serve as help."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )


def _check_plain(value: Any) -> Any:
    """Options must survive the way into a TOML file and back."""
    if isinstance(value, dict):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise ValueError(f"the key {key!r} is not text")
            _check_plain(entry)
    elif isinstance(value, list):
        for entry in value:
            _check_plain(entry)
    elif not isinstance(value, str | int | float | datetime.date | datetime.time):
        raise ValueError(f"{value!r} cannot stand in a TOML file; use text, numbers, true/false, lists and tables")
    return value


Options = Annotated[dict[str, Any], AfterValidator(_check_plain)]
"""A free-form table that can be written as TOML."""
