"""Wall time of optimizer steps."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["StepClock", "StepCounters"]


@dataclass(frozen=True)
class StepCounters:
    """Sums over the optimizer steps of one rank. ``later - earlier`` gives those of the steps between.

    Args:
        steps: Optimizer steps, as ``trainer.global_step`` counts them.
        seconds: Their wall time, without validation and checkpoints.
        barrier_seconds: The part of it spent in collectives that carry nothing, only the wait for other ranks.
        samples: Samples of this rank; None where a batch did not tell its size.
        cpu_seconds: Processor time of this process in :attr:`seconds`, all threads together.

    """

    steps: int = 0
    seconds: float = 0.0
    barrier_seconds: float = 0.0
    samples: int | None = 0
    cpu_seconds: float = 0.0

    def __sub__(self, earlier: "StepCounters") -> "StepCounters":
        unknown = self.samples is None or earlier.samples is None
        return StepCounters(
            self.steps - earlier.steps,
            self.seconds - earlier.seconds,
            self.barrier_seconds - earlier.barrier_seconds,
            None if unknown else (self.samples or 0) - (earlier.samples or 0),
            self.cpu_seconds - earlier.cpu_seconds,
        )


class StepClock:
    """Adds up wall time and samples of optimizer steps; it stands still until the first :meth:`resume`.

    Attributes:
        closed: Sums up to the end of the last whole step.

    """

    def __init__(self) -> None:
        self.closed = StepCounters()
        self._seconds = 0.0
        self._cpu_seconds = 0.0
        self._barrier_seconds = 0.0
        self._samples: int | None = 0
        self._running_since: float | None = None
        self._cpu_since = 0.0

    def resume(self) -> None:
        """Let time count. No effect while it counts."""
        if self._running_since is None:
            self._running_since, self._cpu_since = time.perf_counter(), time.process_time()

    def pause(self) -> None:
        """Let time pass uncounted until :meth:`resume`. No effect while paused."""
        if self._running_since is not None:
            self._seconds += time.perf_counter() - self._running_since
            self._cpu_seconds += time.process_time() - self._cpu_since
            self._running_since = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the enclosed work out."""
        was_running = self._running_since is not None
        self.pause()
        try:
            yield
        finally:
            if was_running:
                self.resume()

    @contextmanager
    def barrier(self) -> Iterator[None]:
        """Count the enclosed time as waiting for other ranks, unless paused."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._running_since is not None:
                self._barrier_seconds += time.perf_counter() - start

    def add_samples(self, samples: int | None) -> None:
        """Add the samples of a batch; None when unknown, which makes the sum unknown."""
        self._samples = None if samples is None or self._samples is None else self._samples + samples

    def close_step(self, steps: int = 1) -> StepCounters:
        """End one step here, or several that were taken in one batch, and return the sums so far."""
        self.pause()
        self.resume()
        total = self.closed.steps + steps
        self.closed = StepCounters(total, self._seconds, self._barrier_seconds, self._samples, self._cpu_seconds)
        return self.closed
