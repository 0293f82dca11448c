"""Hidden states and LM head as one module: whoever shards a model over ranks wraps its one forward pass."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from limes.models.attention import AttentionPlan
from limes.models.lm_head import HeadTargets, head_log_probs


class LogProbs(nn.Module):
    """Log-probs of a causal LM; its parameters are the model's.

    Attributes:
        head: computes log-probs from hidden states and LM head; `lm_head.head_log_probs` or one of its signature.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.head: Any = head_log_probs

    def forward(
        self,
        token_ids_N: Tensor,
        positions_N: Tensor,
        plan: AttentionPlan,
        head_rows_P: Tensor,
        targets: HeadTargets,
        settings: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Log-probs `[M]` and entropies `[P]`; `settings` as in `lm_head.head_log_probs`."""
        output = self.model.base_model(
            input_ids=token_ids_N[None], position_ids=positions_N[None], use_cache=False, attention_plan=plan
        )
        hidden_PE = output.last_hidden_state[0].index_select(0, head_rows_P)
        return self.head(hidden_PE, self.model.get_output_embeddings().weight, targets, **settings)
