"""Which elements of a tensor belong to which rank."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Split"]


@dataclass(frozen=True)
class Split:
    """A tensor divided along one dimension into equal pieces.

    Args:
        dim: The dimension.
        parts: How many equal parts lie one behind another along it, each of which is divided: 3 for queries, keys and
            values in one matrix.

    """

    dim: int
    parts: int = 1

    def take(self, full: Tensor, rank: int, ranks: int) -> Tensor:
        """Return a copy of a rank's piece."""
        pieces = [part.chunk(ranks, self.dim)[rank] for part in full.chunk(self.parts, self.dim)]
        return torch.cat(pieces, self.dim)

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the whole from the pieces of all ranks."""
        by_part = zip(*(piece.chunk(self.parts, self.dim) for piece in pieces), strict=True)
        return torch.cat([torch.cat(part, self.dim) for part in by_part], self.dim)
