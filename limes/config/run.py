"""Settings of the run folder and what is reported."""

from typing import Literal

from pydantic import Field, NonNegativeInt

from limes.config.base import Section


class RunConfig(Section):
    """Name, place, seed and reports of a run."""

    name: str | None = None
    """Folder name under `dir`; default: the recipe's name with date and time."""

    dir: str = "runs"
    """Where run folders are made; a folder that exists is never written into."""

    seed: NonNegativeInt = 42
    """Governs data order and sampling."""

    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default_factory=list)
    """Metric sinks beside `metrics.jsonl`."""

    project: str = "limes"
    """Project name given to the trackers."""

    num_shown_samples: NonNegativeInt = 3
    """Sampled answers shown before and after training."""
