"""Steps that do not count, since something was recorded while they ran."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

from lightning_commopt.callbacks.monitor.averages import RankCounters

__all__ = ["LeftOut", "Recorder"]


@runtime_checkable
class Recorder(Protocol):
    """A callback that makes steps longer while it records them, the same ones on all ranks."""

    @property
    def records(self) -> bool:
        """Whether it records the batch that runs, or will from its beginning."""


class LeftOut:
    """Takes what was counted in recorded steps off all that is counted.

    Args:
        callbacks: Those that record are asked.
        snapshot: Returns every rank's counters. A collective.

    """

    def __init__(self, callbacks: Iterable[object], snapshot: Callable[[], Sequence[RankCounters]]) -> None:
        self._recorders = [callback for callback in callbacks if isinstance(callback, Recorder)]
        self._snapshot = snapshot
        self._before: Sequence[RankCounters] | None = None  # while something is recorded
        self._pieces: list[list[RankCounters]] = []

    @property
    def now(self) -> bool:
        """Whether the step that runs does not count."""
        return self._before is not None

    @property
    def steps(self) -> int:
        """Steps that did not count so far."""
        return sum(piece[0].clock.steps for piece in self._pieces)

    def batch_begins(self) -> None:
        """After the callbacks before it began, or before those after it do. A collective where recording begins."""
        if self._before is None and any(recorder.records for recorder in self._recorders):
            self._before = self._snapshot()

    def step_done(self) -> None:
        """A step has ended: the last one that does not count where nothing is recorded now. A collective then."""
        if self._before is not None and not any(recorder.records for recorder in self._recorders):
            self.end()

    def end(self) -> None:
        """Recording has ended. A collective where it had begun."""
        if self._before is not None:
            after = self._snapshot()
            self._pieces.append([later - earlier for earlier, later in zip(self._before, after, strict=True)])
            self._before = None

    def without(self, counters: Sequence[RankCounters]) -> list[RankCounters]:
        """Return the counters as if those steps had not been."""
        for piece in self._pieces:
            counters = [counter - part for counter, part in zip(counters, piece, strict=True)]
        return list(counters)
