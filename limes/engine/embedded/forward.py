"""The forward pass of one engine step: from a step to the final hidden states that tokens are drawn from."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from limes.engine.embedded.kv_cache import KVCache, StepAttention
from limes.engine.embedded.scheduler import Piece, Step
from limes.engine.embedded.sequence import Prompt
from limes.models.attention import Row
from limes.models.policy import Policy


def forward_step(policy: Policy, cache: KVCache, step: Step) -> tuple[Tensor, list[Tensor]]:
    """Run the model over a step's tokens and store their keys and values.

    Returns:
        hidden states `[num_decodes, E]` of the decoded tokens, and `[E]` of each piece's last token.
    """
    token_ids = [answer.token_ids[-1] for answer in step.decodes]
    positions = [len(answer.prompt.token_ids) + len(answer.token_ids) - 1 for answer in step.decodes]
    write_slots = [answer.slots[len(answer.token_ids) - 1 : len(answer.token_ids)] for answer in step.decodes]
    decodes = [(answer.prompt.slots, answer.slots[: len(answer.token_ids)]) for answer in step.decodes]
    rows, ends = [], []
    for piece in step.pieces:
        before, path = _path(piece)
        rows.append(Row(len(token_ids), piece.num, path))
        token_ids.extend(piece.owner.token_ids[piece.start : piece.start + piece.num])
        positions.extend(range(before + piece.start, before + piece.start + piece.num))
        write_slots.append(path[-piece.num :])
        ends.append(len(token_ids) - 1)
    plan = StepAttention(cache, np.concatenate(write_slots), decodes, rows)
    device = policy.device
    hidden = policy.hidden(torch.tensor(token_ids, device=device), torch.tensor(positions, device=device), plan)
    return hidden[: len(step.decodes)], [hidden[end] for end in ends]


def _path(piece: Piece) -> tuple[int, np.ndarray]:
    """Tokens before the owner's own, and the slots of everything up to the piece's end."""
    own = piece.owner.slots[: piece.start + piece.num]
    if isinstance(piece.owner, Prompt):
        return 0, own
    prompt_slots = piece.owner.prompt.slots
    return len(prompt_slots), np.concatenate([prompt_slots, own])
