"""Settings of checkpoints."""

from pydantic import PositiveInt

from limes.config.base import Section


class CheckpointConfig(Section):
    """When state is saved and where a run starts from."""

    save_interval: PositiveInt | None = None
    """Save after every so many rollouts, at each epoch's end and after the last; absent means only after the last."""

    load: str | None = None
    """A checkpoint folder to continue from: weights, optimizer, schedule and data cursor."""
