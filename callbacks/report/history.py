"""How a fit went, interval by interval, in bounded memory."""

import dataclasses
from dataclasses import dataclass
from typing import Any

__all__ = ["History", "Interval"]

_KEPT = 200


@dataclass(frozen=True)
class Interval:
    """Averages over consecutive optimizer steps.

    Args:
        first_step: The first of them, as ``trainer.global_step`` counts after it.
        last_step: The last.
        compute_ms: As in :class:`StepAverages`, like the next three; None where nothing was measured.
        exposed_comm_ms: See there.
        waiting_ms: See there.
        compression_error: See there.
        loss: Mean training loss on rank 0; None where ``training_step`` gives none.
        learning_rate: Of the first optimizer's first group, at the end.

    """

    first_step: int
    last_step: int
    compute_ms: float | None = None
    exposed_comm_ms: float | None = None
    waiting_ms: float | None = None
    compression_error: float | None = None
    loss: float | None = None
    learning_rate: float | None = None

    @property
    def steps(self) -> int:
        """How many steps."""
        return self.last_step - self.first_step + 1

    def joined(self, later: "Interval") -> "Interval":
        """Return one interval for two that follow each other; errors by the larger, the rate at the end."""
        means: dict[str, Any] = {
            name: _mean(getattr(self, name), self.steps, getattr(later, name), later.steps)
            for name in ("compute_ms", "exposed_comm_ms", "waiting_ms", "loss")
        }
        errors = [e for e in (self.compression_error, later.compression_error) if e is not None]
        return dataclasses.replace(
            later, first_step=self.first_step, compression_error=max(errors, default=None), **means
        )


class History:
    """Intervals in their order. When there are too many, neighbours become one."""

    def __init__(self) -> None:
        self.intervals: list[Interval] = []

    def add(self, interval: Interval) -> None:
        """Append an interval."""
        self.intervals.append(interval)
        if len(self.intervals) > _KEPT:
            pairs = zip(self.intervals[:_KEPT:2], self.intervals[1:_KEPT:2], strict=True)
            self.intervals = [first.joined(second) for first, second in pairs] + self.intervals[_KEPT:]


def _mean(first: float | None, first_steps: int, second: float | None, second_steps: int) -> float | None:
    if first is None or second is None:
        return first if second is None else second
    return (first * first_steps + second * second_steps) / (first_steps + second_steps)
