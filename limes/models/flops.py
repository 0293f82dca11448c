"""What a token costs: enough to balance work, not to report it."""

from __future__ import annotations

from typing import Any


def dense_tokens(settings: Any) -> float:
    """Length of the text before a token at which its attention costs as much as its matrix products.

    Args:
        settings: of a transformers model.
    """
    text = settings.get_text_config()
    heads, hidden = text.num_attention_heads, text.hidden_size
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    weights = hidden * head_dim * 2 * (heads + key_heads) + 3 * hidden * inner
    return weights / (2 * heads * head_dim)  # 2 operations a weight, against 4 a head size and token of the text
