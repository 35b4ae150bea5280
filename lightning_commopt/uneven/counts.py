"""How many batches each rank has, and what is said about it."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

__all__ = ["Count", "Told", "Uneven"]

Uneven = Literal["error", "trim", "join"]
"""What to do when ranks have different numbers of batches."""


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


class Told(NamedTuple):
    """What is said about one kind of loader.

    Args:
        stage: ``"training"``, ``"validation"``, ``"test"`` or ``"predict"``.
        joins: Whether a rank that has ended can go on with weight 0.

    """

    stage: str = "training"
    joins: bool = True

    def uneven(self, batches: Sequence[object]) -> str:
        """Say that the numbers of batches by rank differ, and what to do."""
        why = (
            "A rank that ends first would average its next epoch with the others' last batches"
            if self.stage == "training"
            else "All ranks must run each forward together, since it gathers or sends parts of the model"
        )
        return f"Ranks have different numbers of {self.stage} batches, by rank: {list(batches)}. {why}: {self._cure}."

    def ended(self, ended: Sequence[int], batches: int) -> str:
        """Say that some ranks end after a number of batches while others go on, and what to do."""
        return (
            f"The {self.stage} batches of rank(s) {list(ended)} end after {batches}, other ranks have more than "
            f"{batches}: {self._cure}."
        )

    def none(self, empty: Sequence[int]) -> str:
        """Say that some ranks have no batch while others have."""
        return (
            f"Rank(s) {list(empty)} have no {self.stage} batch, while other ranks have: no setting of `uneven` can "
            "make up for that. Give every rank at least one batch."
        )

    @property
    def _cure(self) -> str:
        trim = "`uneven='trim'` (every rank stops after the shortest)"
        join = " or `uneven='join'` (a rank that has ended repeats its last batch with weight 0)"
        even = "give every rank as many batches, as `DistributedSampler` does"
        if self.stage == "predict":
            even = "give every rank as many batches, which Lightning's sampler for `predict` does not"
        return f"{even}, or choose {trim}{join if self.joins else ''}"
