"""limes trains language models by reinforcement learning."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from limes.config import Config

__all__ = ["load_config", "train"]


def __getattr__(name: str) -> Any:
    """Load what is asked for: `import limes` alone imports nothing heavy."""
    if name == "load_config":
        return importlib.import_module("limes.config").load_config
    if name == "train":
        return importlib.import_module("limes.train")
    raise AttributeError(f"module 'limes' has no attribute '{name}'")


class _Train(ModuleType):
    """`limes.train`: a module, and the function that runs a configuration."""

    def __call__(self, config: Config) -> Any:
        from limes.config import Resolved

        return self.run_train(Resolved(config, {}))


class _Package(ModuleType):
    """Importing the module `limes.train` sets it here; it becomes callable however it was imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "train" and isinstance(value, ModuleType):
            value.__class__ = _Train
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
