"""The base class of every settings section."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One table of the settings: frozen, typed, unknown keys refused, field docstrings serve as help."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)
