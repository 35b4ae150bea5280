"""A small gloo group for agreement between ranks; nothing of it ever touches the accelerator."""

from collections.abc import Mapping, Sequence
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
        parts: Sets of ranks that do not overlap, together all ranks; the group is the one with this rank. Without it,
            all ranks.

    """

    def __init__(self, timeout: timedelta | None = None, parts: Sequence[Sequence[int]] | None = None) -> None:
        chosen: Sequence[Sequence[int] | None] = parts or [None]
        groups = [dist.new_group(part, backend="gloo", timeout=timeout) for part in chosen]
        self.group = next(group for group in groups if dist.get_rank(group) >= 0)
        self.rank = dist.get_rank(self.group)
        self.world = dist.get_world_size(self.group)

    @property
    def members(self) -> tuple[int, ...]:
        """Their ranks in the run, by rank in the group."""
        return tuple(dist.get_process_group_ranks(self.group))

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank."""
        values: list[T | None] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]  # all were filled

    def gather(self, value: T) -> list[T] | None:
        """Return every rank's value on rank 0 of the group, None elsewhere."""
        values: list[T | None] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(value, values, group=self.group, group_dst=0)
        return values  # type: ignore[return-value]

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return one rank's value."""
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=source)
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
