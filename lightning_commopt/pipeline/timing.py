"""When the actions of steps ran."""

import time
from collections import deque
from typing import Any, NamedTuple

import torch

from lightning_commopt.pipeline.actions import Action

__all__ = ["StepTimer", "Timed", "TimedStep"]


class Timed(NamedTuple):
    """An action and when it ran, in seconds since its step began."""

    action: Action
    start: float
    end: float


class TimedStep(NamedTuple):
    """One step of one rank.

    Args:
        microbatches: Number of microbatches in it.
        timeline: When its actions ran.
        seconds: That it took.

    """

    microbatches: int
    timeline: tuple[Timed, ...]
    seconds: float


class StepTimer:
    """Times the actions of steps: by the processor's clock, on a GPU by events of its stream, without waiting for it.

    Args:
        device: Where steps run.
        kept: How many steps are remembered, the last ones.
        skipped: How many first ones are not, since they warm up.

    """

    def __init__(self, device: torch.device, kept: int = 16, skipped: int = 2) -> None:
        self._on_gpu = device.type == "cuda"
        self._skipped = skipped
        self._steps: deque[list[tuple[Action | None, Any, Any]]] = deque(maxlen=kept)
        self._running: list[tuple[Action | None, Any, Any]] = []
        self._begun: Any = None

    def now(self) -> Any:
        """Return a mark of this moment, for :meth:`note`."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        """A step begins."""
        self._running, self._begun = [], self.now()

    def note(self, action: Action, start: Any) -> None:
        """An action ends now."""
        self._running.append((action, start, self.now()))

    def end(self) -> None:
        """The step ends."""
        self._running.append((None, self._begun, self.now()))
        if self._skipped:
            self._skipped -= 1
        else:
            self._steps.append(self._running)

    def steps(self) -> list[TimedStep]:
        """Return the remembered steps. Waits for the GPU."""
        return [self._timed(marks) for marks in self._steps]

    def _timed(self, marks: list[tuple[Action | None, Any, Any]]) -> TimedStep:
        _, begun, ended = marks[-1]
        if self._on_gpu:
            ended.synchronize()
        timeline = tuple(
            Timed(action, self._seconds(begun, start), self._seconds(begun, end))
            for action, start, end in marks
            if action is not None
        )
        microbatches = {timed.action.microbatch for timed in timeline}
        return TimedStep(len(microbatches), timeline, self._seconds(begun, ended))

    def _seconds(self, first: Any, then: Any) -> float:
        seconds: float = first.elapsed_time(then) / 1e3 if self._on_gpu else then - first
        return seconds
