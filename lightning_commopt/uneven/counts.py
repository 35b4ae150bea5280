"""How many batches each rank has, and what is said about it."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

__all__ = ["Count", "Uneven", "ended_text", "no_batches_text", "uneven_text"]

Uneven = Literal["error", "trim", "join"]
"""What to do when ranks have different numbers of batches."""

_CURE = (
    "give every rank as many batches, as `DistributedSampler` does, or choose `uneven='trim'` (every rank stops after "
    "the shortest) or `uneven='join'` (a rank that has ended repeats its last batch with weight 0; DDP alone)"
)


class Count(NamedTuple):
    """What a rank knows of its training loader.

    Args:
        batches: Batches of an epoch, within the Trainer's limits; inf where nothing tells.
        unsized: Whether some loader has no length, so that an epoch may end earlier.
        empty: Whether there is no batch at all.

    """

    batches: float
    unsized: bool
    empty: bool


def uneven_text(batches: Sequence[float]) -> str:
    """Say that the numbers of batches by rank differ, and what to do."""
    return (
        f"Ranks have different numbers of training batches, by rank: {list(batches)}. A rank that ends first would "
        f"average its next epoch with the others' last batches: {_CURE}."
    )


def ended_text(ended: Sequence[int], batches: int) -> str:
    """Say that some ranks end after a number of batches while others go on, and what to do."""
    return (
        f"The training batches of rank(s) {list(ended)} end after {batches}, other ranks have more than {batches}: "
        f"{_CURE}."
    )


def no_batches_text(empty: Sequence[int]) -> str:
    """Say that some ranks have no batch while others have."""
    return (
        f"Rank(s) {list(empty)} have no training batch, while other ranks have: no setting of `uneven` can make up for "
        "that. Give every rank at least one batch."
    )
