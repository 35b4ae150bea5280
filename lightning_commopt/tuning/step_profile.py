"""What a step consists of, from marks on the way."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from torch.nn import Parameter

from lightning_commopt.measure import Clock
from lightning_commopt.tuning.cost_model import ComputeProfile

__all__ = ["StepProfile", "StepTimes", "merged_profile"]

_KEPT = 64


@dataclass(frozen=True)
class StepTimes:
    """One step of one rank, ms.

    Args:
        alone_ms: From the end of the last exchange to the beginning of this backward: optimizer, data, forward.
        compute_ms: From there until the last gradient is there.
        backward_ms: From there until all gradients are exchanged.
        ready: ``(elements, ms)``: gradients there, and when, counted from the beginning of backward.

    """

    alone_ms: float
    compute_ms: float
    backward_ms: float
    ready: tuple[tuple[int, float], ...] = ()

    @property
    def step_ms(self) -> float:
        """The whole step."""
        return self.alone_ms + self.backward_ms


class StepProfile:
    """Takes marks in each step; they are read when somebody asks.

    Args:
        clock: The clock of the device.

    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steps: list[tuple[list[tuple[Any, Any]], Any, list[tuple[int, Any]], Any]] = []
        self._last: Any = None  # where the time alone begins
        self._alone: list[tuple[Any, Any]] = []  # time alone before a pause
        self._begun: Any = None
        self._ready: list[tuple[int, Any]] = []
        self._handles: list[Any] = []

    def watch(self, parameters: Mapping[str, Parameter]) -> None:
        """Note when gradients become ready, until :meth:`unwatch`."""
        self.unwatch()
        self._handles = [
            p.register_post_accumulate_grad_hook(partial(self._note, p.numel())) for p in parameters.values()
        ]

    def unwatch(self) -> None:
        """Note it no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def pause(self) -> None:
        """What follows, until :meth:`resume`, is no part of a step."""
        if self._last is not None:
            self._alone.append((self._last, self._clock.mark()))
            self._last = None

    def resume(self) -> None:
        """The step begins, or goes on."""
        if self._last is None:
            self._last = self._clock.mark()

    def backward_begins(self) -> None:
        """A synchronising backward begins."""
        self.pause()
        self._ready = []
        self._begun = self._clock.mark()

    def backward_ended(self) -> None:
        """All gradients are exchanged."""
        end = self._clock.mark()
        if self._alone and self._begun is not None:
            self._steps.append((self._alone, self._begun, self._ready, end))
            del self._steps[:-_KEPT]
        self._last, self._alone = end, []

    def take(self) -> list[StepTimes]:
        """Return the steps since the last time, and forget them."""
        steps, self._steps = self._steps, []
        return [self._times(*marks) for marks in steps]

    def _times(self, alone: list[tuple[Any, Any]], begun: Any, ready: list[tuple[int, Any]], end: Any) -> StepTimes:
        elapsed = self._clock.elapsed_ms
        backward_ms, there, moments = elapsed(begun, end), 0, []
        for numel, mark in ready:
            there += numel
            moments.append((there, elapsed(begun, mark)))
        compute_ms = moments[-1][1] if moments else backward_ms
        return StepTimes(sum(elapsed(*span) for span in alone), compute_ms, backward_ms, tuple(moments))

    def _note(self, numel: int, _: Parameter) -> None:
        self._ready.append((numel, self._clock.mark()))


def merged_profile(everyone: list[list[StepTimes]], contention: float) -> ComputeProfile:
    """Return a step without exchange from what the ranks measured.

    Of each rank the quickest step counts, since others disturb it; of all ranks the slowest, since the others wait.

    Args:
        everyone: By rank, at least one step each.
        contention: See :class:`ComputeProfile`.

    """
    alone = max(median(step.alone_ms for step in steps) for steps in everyone)
    quickest = [min(steps, key=lambda step: step.compute_ms) for steps in everyone]
    slowest = max(quickest, key=lambda step: step.compute_ms)
    return ComputeProfile(alone, slowest.compute_ms, 0.0, slowest.ready, contention)
