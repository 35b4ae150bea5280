"""Now and then: how far a compressed mean is from the dense one."""

import torch
from torch import Tensor

from lightning_commopt.measure import Traffic
from lightning_commopt.routes.transport import Transport

__all__ = ["MeanCheck"]


class MeanCheck:
    """Sends one bucket of a round a second time, densely, and compares the two means.

    Args:
        transports: Of the groups over which an all-reduce gives the sum over all ranks, one after the other.

    """

    def __init__(self, transports: list[Transport]) -> None:
        self.every = 0
        """Rounds between two checks; 0: never."""
        self.buckets = 0
        """How many buckets a round has; 0 while they are not known yet."""
        self.cosine: Tensor | None = None
        """Cosine of the last comparison, a 0-d float64 tensor."""
        self._transports = transports

    def due(self, round: int, bucket: int) -> bool:
        """Whether a bucket is to be compared in a round: one after the other gets its turn.

        Args:
            round: Rounds exchanged before.
            bucket: Number of the bucket.

        """
        is_round = self.every and self.buckets and round and round % self.every == 0
        return bool(is_round) and round // self.every % self.buckets == bucket

    def dense_sum(self, bucket: Tensor) -> tuple[Tensor, Traffic]:
        """Return the sum of a bucket over ranks, which stays as it is, and the bytes sent for it."""
        total, sent = bucket.float(), 0
        if total is bucket:
            total = bucket.clone()
        for transport in self._transports:
            transport.all_reduce(total)
            sent += transport.ring_bytes(total.nbytes)
        return total, Traffic(payload=sent)

    def compare(self, dense: Tensor, mean: Tensor) -> None:
        """Keep the cosine of two flat tensors; NaN where one of them is not finite or zero."""
        one, other = dense.double(), mean.double()
        self.cosine = torch.dot(one, other) / (one.norm() * other.norm())
