"""A small gloo group for agreement between ranks; nothing of it ever touches the accelerator."""

from collections.abc import Mapping
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

__all__ = ["ControlGroup", "FingerprintError"]

T = TypeVar("T")


class FingerprintError(RuntimeError):
    """Ranks were set up differently."""


class ControlGroup:
    """Collectives on plain Python objects. Every rank must make the same calls in the same order.

    Args:
        timeout: How long a rank waits for the others.

    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank."""
        values: list[T | None] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]  # all were filled

    def gather(self, value: T) -> list[T] | None:
        """Return every rank's value on rank 0, None elsewhere."""
        values: list[T | None] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values  # type: ignore[return-value]

    def broadcast(self, value: T) -> T:
        """Return rank 0's value."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a CPU tensor by its sum over ranks."""
        dist.all_reduce(tensor, group=self.group)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.group)

    def compare(self, fingerprint: Mapping[str, str]) -> None:
        """Check that ranks agree, field by field.

        Raises:
            FingerprintError: On every rank, naming the field, the first rank that differs from rank 0, and both values.

        """
        for rank, other in enumerate(everyone := self.all_gather(dict(fingerprint))):
            for field in sorted(everyone[0].keys() | other.keys()):
                mine, theirs = everyone[0].get(field, "(missing)"), other.get(field, "(missing)")
                if mine != theirs:
                    raise FingerprintError(
                        f"Rank {rank} was set up differently from rank 0: `{field}` is {theirs} there and {mine} on "
                        "rank 0. All ranks must run the same model, options and versions."
                    )
