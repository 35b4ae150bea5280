"""Times and counts of the gradient exchange, as they happen."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_commopt.measure.clock import Clock

__all__ = ["Recorder"]

_KEPT = 20_000  # collectives whose durations wait to be compared with those of other ranks


class Recorder:
    """Collects spans from the thread or stream that exchanges, and from backward.

    Args:
        clock: The clock of the device.

    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.totals_ms = dict.fromkeys(("encode", "decode", "collective", "exposed"), 0.0)
        self.wait_ms: float | None = None
        self._spans: deque[tuple[str, Any, Any]] = deque()
        self._uncompared: deque[float] = deque(maxlen=_KEPT)

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Time a piece of work as ``phase``."""
        start = self.clock.mark()
        yield
        self.add(phase, start, self.clock.mark())

    def add(self, phase: str, start: Any, end: Any) -> None:
        """Add a piece of work between two marks."""
        self._spans.append((phase, start, end))
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
