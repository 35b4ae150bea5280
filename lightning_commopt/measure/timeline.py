"""When the pieces of a few steps happened, on every rank."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from lightning_commopt.measure.clock import Clock

__all__ = ["Span", "Timeline", "aligned"]

_LIMIT = 4_000  # spans of one recording


class Span(NamedTuple):
    """A piece of work.

    Args:
        phase: What was done: ``"encode"``, ``"collective"``, ``"backward"`` and so on.
        start_ms: When it began.
        end_ms: When it ended.
        bucket: Position of the bucket in the round; None for work that belongs to none.

    """

    phase: str
    start_ms: float
    end_ms: float
    bucket: int | None = None

    def shifted(self, by_ms: float) -> "Span":
        """Return the same piece of work, later by ``by_ms``."""
        return self._replace(start_ms=self.start_ms + by_ms, end_ms=self.end_ms + by_ms)


class Timeline:
    """Keeps marks of a clock from its construction on; of a long recording the beginning.

    Args:
        clock: The clock of the device, the one whose marks are added.

    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._origin = clock.mark()
        self._marks: list[tuple[str, Any, Any, int | None]] = []

    def add(self, phase: str, start: Any, end: Any, bucket: int | None = None) -> None:
        """Keep a piece of work between two marks, from any thread."""
        if len(self._marks) < _LIMIT:
            self._marks.append((phase, start, end, bucket))

    def spans(self) -> list[Span]:
        """Return what was kept, in milliseconds since the beginning; waits for the device."""
        since = self.clock.elapsed_ms
        return [Span(p, since(self._origin, s), since(self._origin, e), bucket) for p, s, e, bucket in self._marks]


def aligned(ranks: Sequence[Sequence[Span]]) -> list[list[Span]]:
    """Bring every rank's recording onto one clock, and tell waiting from transfer in its collectives.

    Clocks of ranks have different origins. A collective ends on all ranks at nearly the same moment, so a rank's clock
    is set by the median distance of its ends from those of rank 0. The shortest duration of a collective is its
    transfer (the rank that came last did not wait), and what another rank took longer was waiting for it.

    Args:
        ranks: The spans of each rank, of the same steps.

    Returns:
        The spans of each rank with ``"wait"`` and ``"transfer"`` instead of ``"collective"``; the earliest starts at 0.

    """
    collectives = [_collectives(spans) for spans in ranks]
    common = set(collectives[0]).intersection(*collectives) if ranks else set()
    transfers_ms = {key: min(own[key].end_ms - own[key].start_ms for own in collectives) for key in common}
    moved = []
    for spans, own in zip(ranks, collectives, strict=True):
        late_ms = median([own[key].end_ms - collectives[0][key].end_ms for key in common]) if common else 0.0
        transfer_of = {id(span): transfers_ms.get(key, span.end_ms - span.start_ms) for key, span in own.items()}
        moved.append([part.shifted(-late_ms) for span in spans for part in _parts(span, transfer_of.get(id(span)))])
    first_ms = min((span.start_ms for spans in moved for span in spans), default=0.0)
    return [[span.shifted(-first_ms) for span in spans] for spans in moved]


def _collectives(spans: Sequence[Span]) -> dict[tuple[int | None, int], Span]:
    """Return collectives by their bucket and how many that bucket had before: the same key on all ranks."""
    seen: defaultdict[int | None, int] = defaultdict(int)
    found = {}
    for span in spans:
        if span.phase == "collective":
            found[span.bucket, seen[span.bucket]] = span
            seen[span.bucket] += 1
    return found


def _parts(span: Span, transfer_ms: float | None) -> list[Span]:
    """Divide a collective; ``transfer_ms`` is None for anything else."""
    if transfer_ms is None:
        return [span]
    arrived_ms = span.end_ms - transfer_ms
    wait = span._replace(phase="wait", end_ms=arrived_ms)
    transfer = span._replace(phase="transfer", start_ms=arrived_ms)
    return [wait, transfer] if wait.end_ms > wait.start_ms else [transfer]
