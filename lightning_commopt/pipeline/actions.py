"""What a pipeline schedule is made of."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

__all__ = ["Action", "Kind", "Schedule"]


class Kind(Enum):
    """What is computed: a forward, and a backward in one piece or in two."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


class Action(NamedTuple):
    """One computation of one microbatch on one stage."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """The order in which each rank computes.

    Args:
        placement: The rank of each stage; stages are numbered from the input to the loss.
        actions: What each rank computes, in its order.

    """

    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.placement)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.actions)

    @property
    def microbatches(self) -> int:
        """Number of microbatches in a step."""
        return 1 + max(action.microbatch for action in self.actions[0])

    def local_stages(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in ascending order."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)
