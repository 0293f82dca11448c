"""Typed settings from TOML recipes, flags and plain Python. Importing this never imports torch."""

from limes.config.batch import BatchAlgebra, batch_algebra
from limes.config.load import Resolved, load_config, resolve
from limes.config.root import Config
from limes.config.text import to_toml

__all__ = ["BatchAlgebra", "Config", "Resolved", "batch_algebra", "load_config", "resolve", "to_toml"]
