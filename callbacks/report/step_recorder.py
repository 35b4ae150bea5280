"""Records when the pieces of a few steps happened on this rank."""

from collections.abc import Callable
from typing import Any

from lightning_commopt.callbacks.report.content import RecordedSteps
from lightning_commopt.measure import Clock, Timeline

__all__ = ["SHOWN_STEPS", "StepRecorder"]

SHOWN_STEPS = 3
_SETTLING_STEPS = 2  # after the ranks have compared their counters


class StepRecorder:
    """Keeps the newest complete recording of three steps.

    One step more is recorded than is kept: DDP's reducer tells of a round when the next one is over.

    Args:
        clock: The clock of the device.
        record: Lets the gradient exchange add its spans to a timeline; None ends that.

    """

    def __init__(self, clock: Clock, record: Callable[[Timeline | None], None]) -> None:
        self._clock, self._record = clock, record
        self._timeline: Timeline | None = None
        self._first_step = 0
        self._steps = 0
        self._until_start: int | None = _SETTLING_STEPS
        self._last: Any = None  # mark at the end of the last piece of work
        self._step_start: Any = None
        self._done: tuple[int, Timeline] | None = None

    def note(self, phase: str) -> None:
        """End a piece of work of the training loop, which began when the one before ended."""
        if self._timeline is not None:
            now = self._clock.mark()
            self._timeline.add(phase, self._last, now)
            self._last = now

    def step_done(self, global_step: int) -> None:
        """End an optimizer step; recording may begin or end here."""
        if self._timeline is not None:
            self._end_step(self._timeline)
        elif self._until_start is not None:
            self._until_start -= 1
            if self._until_start <= 0:
                self._start(global_step + 1)

    def record_again(self) -> None:
        """Record the steps that follow, unless a recording is under way."""
        if self._timeline is None:
            self._until_start = _SETTLING_STEPS

    def begin_anew(self) -> None:
        """Forget what was recorded, and record the steps that follow."""
        self.close()
        self._done, self._until_start = None, _SETTLING_STEPS

    def close(self) -> None:
        """Drop a recording that is not complete."""
        self._record(None)
        self._timeline = None

    def recorded(self) -> RecordedSteps | None:
        """Return the newest complete recording of this rank, None when there is none."""
        if self._done is None:
            return None
        first_step, timeline = self._done
        spans = timeline.spans()
        step_ends_ms = [span.end_ms for span in spans if span.phase == "step"][:SHOWN_STEPS]
        if len(step_ends_ms) < SHOWN_STEPS:
            return None  # there were too many spans for a timeline
        shown = (span for span in spans if span.start_ms >= 0 and span.end_ms <= step_ends_ms[-1])
        return RecordedSteps(first_step, (tuple(shown),))

    def _start(self, first_step: int) -> None:
        self._timeline = Timeline(self._clock)
        self._record(self._timeline)
        self._first_step, self._steps, self._until_start = first_step, 0, None
        self._last = self._step_start = self._clock.mark()

    def _end_step(self, timeline: Timeline) -> None:
        timeline.add("step", self._step_start, self._last)
        self._step_start = self._last
        self._steps += 1
        if self._steps > SHOWN_STEPS:
            self._record(None)
            self._done, self._timeline = (self._first_step, timeline), None
