"""Who is waited for, when nobody moves."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_commopt.failure.phase import Activity, Phase

__all__ = ["Progress", "awaited"]


@dataclass(frozen=True)
class Progress:
    """What is known of a rank.

    Args:
        batch: Batches that it began.
        phase: Where it is.
        step: Optimizer steps when its batch began.
        activity: What its main thread does there.
        still: Beats of the observer since it last moved on.
        done: Whether the run ended there.

    """

    batch: int
    phase: Phase
    step: int
    activity: Activity = Activity.RUNNING
    still: int = 0
    done: bool = False

    @property
    def place(self) -> tuple[int, Phase]:
        """Position in the run."""
        return self.batch, self.phase


def awaited(ranks: Mapping[int, Progress], me: int, beats: int) -> tuple[int, str] | None:
    """Return the rank that holds up this one, and how.

    Only training counts: not set-up, validation, a checkpoint, or compilation.

    Args:
        ranks: What is known, by rank.
        me: The rank that asks.
        beats: How long both must have been still.

    """
    own = ranks[me]
    if own.still < beats:
        return None
    waiting = own.activity == Activity.WAITING
    if finished := [rank for rank, p in ranks.items() if p.done]:
        cause = "ended its run early (had it fewer batches?)"
        return (finished[0], cause) if waiting else None
    others = {rank: p for rank, p in ranks.items() if rank != me}
    if any(not p.phase.trains or p.activity == Activity.COMPILING for p in others.values()):
        return None  # what they do may take its time
    busy = {rank: p for rank, p in others.items() if p.activity == Activity.RUNNING}
    behind = {rank: p for rank, p in busy.items() if p.still >= beats and (waiting or p.place < own.place)}
    if behind:
        return min(behind, key=lambda rank: ranks[rank].place), "does not go on"
    if busy or not waiting or any(p.still < beats for p in others.values()):
        return None
    return _odd_one(ranks)


def _odd_one(ranks: Mapping[int, Progress]) -> tuple[int, str] | None:
    """Return the rank that waits elsewhere than most, the last of them in the run's order when they are as many."""
    places = Counter(p.place for p in ranks.values())
    if len(places) == 1:
        return None
    rank = min(ranks, key=lambda r: (places[ranks[r].place], ranks[r].place))
    others = next(p for p in ranks.values() if p.place != ranks[rank].place)
    return rank, f"waits in another place than the others, which are {others.phase.words(others.step)}"
