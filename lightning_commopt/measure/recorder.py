"""Times and counts of the gradient exchange, as they happen."""

import math
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.autograd import profiler

from lightning_commopt.measure.clock import Clock
from lightning_commopt.measure.timeline import Timeline

__all__ = ["Recorder"]

_KEPT = 20_000  # collectives whose durations wait to be compared with those of other ranks


class _Span:
    """Adds a piece of work to a recorder, unless it raises; a generator would take longer than a small operation."""

    __slots__ = ("_annotation", "_phase", "_recorder", "_start")

    def __init__(self, recorder: "Recorder", phase: str) -> None:
        self._recorder, self._phase = recorder, phase

    def __enter__(self) -> None:
        self._start = self._recorder.clock.mark()
        self._annotation = _seen_by_profiler(self._phase)
        if self._annotation is not None:
            self._annotation.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(kind, *rest)
        if kind is None:
            self._recorder.add(self._phase, self._start, self._recorder.clock.mark())


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
        self._arrived: Any = None  # when the last collective that was waited for was through
        self._ms_per_byte = math.inf  # at the best rate so far
        self._spans: deque[tuple[str, Any, Any]] = deque()
        self._uncompared: deque[float] = deque(maxlen=_KEPT)

    @property
    def bucket(self) -> int | None:
        """Position in the round of the bucket that the calling thread works on."""
        return getattr(self._thread, "bucket", None)

    @bucket.setter
    def bucket(self, index: int | None) -> None:
        self._thread.bucket = index

    def span(self, phase: str) -> "_Span":
        """Time a piece of work as ``phase``; a profiler sees it as ``lightning_commopt::phase``."""
        return _Span(self, phase)

    def add(self, phase: str, start: Any, end: Any) -> None:
        """Add a piece of work between two marks."""
        self._spans.append((phase, start, end))
        if (timeline := self.timeline) is not None:
            timeline.add(phase, start, end, None if phase == "exposed" else self.bucket)
        if len(self._spans) > 10 * _KEPT:
            self.settle()

    def arrived(self, begun: Any, nbytes: int, *, awaited: bool) -> None:
        """Add a collective that is through.

        Several may be under way, one behind the other: each counts from when the one before it was through. When one
        arrived that nobody waited for is not known; it counts as long as its bytes take at the best rate so far.

        Args:
            begun: Mark of when it was issued.
            nbytes: What this rank sent.
            awaited: Whether it was waited for, and is through just now.

        """
        start = begun if self._arrived is None else self.clock.later(begun, self._arrived)
        end = self.clock.mark()
        elapsed_ms = self.clock.known_ms(start, end)
        if awaited:
            self._arrived = end
            if elapsed_ms and nbytes:
                self._ms_per_byte = min(self._ms_per_byte, elapsed_ms / nbytes)
        elif elapsed_ms is not None:
            end = self.clock.after(start, min(elapsed_ms, self._ms_per_byte * nbytes))
        self.add("collective", start, end)

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


def _seen_by_profiler(phase: str) -> AbstractContextManager[object] | None:
    """Annotate a piece of work while a profiler runs; an annotation takes microseconds even when none does."""
    enabled = getattr(profiler, "_is_profiler_enabled", True)
    return profiler.record_function(f"lightning_commopt::{phase}") if enabled else None
