"""Times and counts of the gradient exchange, as they happen."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.autograd import profiler

from lightning_commopt.measure.clock import Clock
from lightning_commopt.measure.timeline import Timeline

__all__ = ["Recorder"]

_KEPT = 20_000  # collectives whose durations wait to be compared with those of other ranks


class Recorder:
    """Collects spans from the thread or stream that exchanges, and from backward.

    Args:
        clock: The clock of the device.

    Attributes:
        timeline: Gets every span too, while it is set.

    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.totals_ms = dict.fromkeys(("encode", "decode", "collective", "exposed"), 0.0)
        self.wait_ms: float | None = None
        self.timeline: Timeline | None = None
        self._thread = threading.local()
        self._spans: deque[tuple[str, Any, Any]] = deque()
        self._uncompared: deque[float] = deque(maxlen=_KEPT)

    @property
    def bucket(self) -> int | None:
        """Position in the round of the bucket that the calling thread works on."""
        return getattr(self._thread, "bucket", None)

    @bucket.setter
    def bucket(self, index: int | None) -> None:
        self._thread.bucket = index

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Time a piece of work as ``phase``; a profiler sees it as ``lightning_commopt::phase``."""
        start = self.clock.mark()
        with _seen_by_profiler(phase):
            yield
        self.add(phase, start, self.clock.mark())

    def add(self, phase: str, start: Any, end: Any) -> None:
        """Add a piece of work between two marks."""
        self._spans.append((phase, start, end))
        if (timeline := self.timeline) is not None:
            timeline.add(phase, start, end, None if phase == "exposed" else self.bucket)
        if len(self._spans) > 10 * _KEPT:
            self.settle()

    def settle(self) -> None:
        """Turn marks into times; waits for the device where marks have not passed yet."""
        while self._spans:
            phase, start, end = self._spans.popleft()
            elapsed = self.clock.elapsed_ms(start, end)
            self.totals_ms[phase] += elapsed
            if phase == "collective":
                self._uncompared.append(elapsed)

    def compare_waiting(self, all_gather: Callable[[list[float]], list[list[float]]]) -> None:
        """Tell waiting from transfer in the collectives since the last comparison.

        The rank that came last to a collective did not wait in it, so the shortest duration is the transfer, and what
        another rank took longer was waiting. A collective: call it on all ranks after the same collectives.

        Args:
            all_gather: Returns every rank's list, by rank.

        """
        self.settle()
        everyone = all_gather(list(self._uncompared))
        own, common = list(self._uncompared), min(map(len, everyone))
        self._uncompared.clear()
        recent = [durations[len(durations) - common :] for durations in everyone]
        transfer_ms = sum(map(min, zip(*recent, strict=True)))
        self.wait_ms = (self.wait_ms or 0.0) + sum(own[len(own) - common :]) - transfer_ms


def _seen_by_profiler(phase: str) -> AbstractContextManager[object]:
    """Annotate a piece of work while a profiler runs; an annotation takes microseconds even when none does."""
    enabled = getattr(profiler, "_is_profiler_enabled", True)
    return profiler.record_function(f"lightning_commopt::{phase}") if enabled else nullcontext()
