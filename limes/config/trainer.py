"""Settings of optimisation."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from limes.config.base import Section


class TrainerConfig(Section):
    """Optimizer, schedule and batch cutting."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""

    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up, over all optimizer steps of the run."""

    lr_warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""

    min_lr: NonNegativeFloat = 0.0
    """Where `linear` and `cosine` end."""

    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay; biases and norms are left out."""

    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's first-moment decay."""

    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's second-moment decay."""

    adam_eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""

    clip_grad: NonNegativeFloat = 1.0
    """Largest gradient norm; 0 turns clipping off. The logged norm is the one before clipping."""

    num_steps_per_rollout: PositiveInt = 1
    """Optimizer steps a rollout is cut into."""

    max_tokens_per_micro_batch: PositiveInt = 8192
    """Tokens in one forward and backward pass; a longer sample goes alone."""

    share_prefixes: bool = True
    """Compute tokens that several samples begin with once, forward and backward."""

    head_chunk: PositiveInt = 1024
    """Rows of the LM head computed at a time; `[tokens, vocab]` never exists at once."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""

    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that share the heads and columns of each layer, by the model's own plan; both kinds of heads must divide
    by it."""

    context_parallel_size: PositiveInt = 1
    """Ranks that share the tokens of each micro-batch, for long sequences."""

    dp_replicate_size: PositiveInt = 1
    """Whole copies of the model, each sharded over the ranks that are left; 1 shards it over all of them."""
