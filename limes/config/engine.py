"""Settings of the generation engine."""

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from limes.config.base import Section


class EngineConfig(Section):
    """The engine that turns prompt ids into sampled ids."""

    kind: Literal["embedded"] = "embedded"
    """`embedded` runs the training module itself on the same tensors."""

    max_running: PositiveInt = 128
    """Sequences decoded together."""

    max_context_len: PositiveInt | None = None
    """Longest prompt plus answer in tokens; default: the model's own limit."""

    kv_cache_tokens: PositiveInt | None = None
    """Room of the KV cache in tokens; default: enough for one rollout at full length, within `kv_cache_gb`."""

    kv_cache_gb: PositiveFloat = 2.0
    """Upper bound of the default KV cache, in GB (1e9 bytes)."""

    page_size: PositiveInt = 16
    """Tokens in one page of the KV cache."""

    prefill_chunk: PositiveInt = 512
    """Prompt tokens computed between two decode steps, so that long prompts do not stall running answers."""
