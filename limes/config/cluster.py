"""Settings of where roles run."""

from typing import Literal

from pydantic import NonNegativeInt

from limes.config.base import Section


class ClusterConfig(Section):
    """Where roles run."""

    kind: Literal["local"] = "local"
    """`local` runs every role in this process, each on its own thread."""

    num_threads: NonNegativeInt = 0
    """CPU threads of torch; 0 leaves torch's choice."""
