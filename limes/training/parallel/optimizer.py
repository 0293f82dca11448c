"""AdamW on this rank's parts of the parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from limes.config.trainer import TrainerConfig
from limes.training.optimizer import PolicyOptimizer
from limes.training.parallel.boxes import Part
from limes.training.parallel.sharding import Piece, ShardedModel, local_of
from limes.training.parallel.tensor import add_up


class ShardedOptimizer(PolicyOptimizer):
    """Steps on the parts themselves, which are float32 at least: they are their own masters.

    All ranks step together: the norm is that of the whole gradient, so each clips by the same factor, and a gradient
    that is not finite on one of them moves nothing on any.
    """

    def __init__(self, model: ShardedModel, config: TrainerConfig) -> None:
        self.model = model
        super().__init__(((piece.name, nn.Parameter(piece.local)) for piece in model.pieces), config)
        assert all(master is own for master, own in zip(self.masters, self.parameters, strict=True))

    def accumulate(self) -> None:
        """Gradients add up over micro-batches, and over ranks, where they are computed."""

    def parts(self) -> dict[str, Part]:
        """What has to be saved of the state, `name/entry` as a single process names it, each number on one rank."""
        ranks = self.model.ranks
        found: dict[str, Part] = {}
        if ranks.replica_rank != 0:
            return found
        for piece, master in zip(self.model.pieces, self.masters, strict=True):
            box = piece.box(ranks)
            if not box.num or (piece.tp_dim is None and ranks.tp_rank != 0):
                continue
            tensors = dict(self.adam.state.get(master, {}))
            step = tensors.pop("step", None)
            if self.model.dtype != master.dtype:  # the model folder has rounded numbers
                tensors["master"] = master.detach()
            found |= {f"{piece.name}/{entry}": Part(value, box, piece.shape) for entry, value in tensors.items()}
            if step is not None and all(start == 0 for start, _ in box.bounds):
                found[f"{piece.name}/step"] = Part.whole(step)
        return found

    @torch.no_grad()
    def _total_norm(self) -> Tensor:
        """Takes over the gradients; the norm of the whole of them, the same on every rank."""
        ranks, layout = self.model.ranks, self.model.ranks.layout
        partial: list[Tensor] = []
        squares = torch.zeros((), dtype=torch.float64, device=ranks.device)
        for piece, master in zip(self.model.pieces, self.masters, strict=True):
            master.grad = _taken(piece)
            if piece.partial and master.grad is not None:
                partial.append(master.grad)
        if layout.tp > 1:
            add_up(partial, ranks.tp_group)
        for piece, master in zip(self.model.pieces, self.masters, strict=True):
            if master.grad is not None and master.grad.numel():
                copies = layout.dp_replicate * (layout.tp if piece.tp_dim is None else 1)
                squares += torch.linalg.vector_norm(master.grad, dtype=torch.float64).square() / copies
        return ranks.sum_of_all(squares).sqrt().to(self.masters[0].dtype)


def _taken(piece: Piece) -> Tensor | None:
    grad, piece.parameter.grad = piece.parameter.grad, None
    return None if grad is None else local_of(grad)
