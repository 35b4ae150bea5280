"""Whether a loss that should fall swings or rises."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

__all__ = ["LossCurve", "Unsteady"]

_FLIPS = 0.95  # of the steps, which is all of twenty; independent noise changes sides in half of them
_SWING = 0.05  # of the level, below which alternation does no harm
_GROWTH = 4.0
_KNOWN = 3  # windows, before which nobody knows what is usual


@dataclass(frozen=True)
class Unsteady:
    """What is wrong with a loss curve.

    Args:
        kind: ``"not finite"``; ``"divergence"``: the loss rose far above its best; ``"oscillation"``: it goes up and
            down and gets nowhere.
        step: Optimizer step (from 1) at whose end it was seen.
        number: The loss that is not finite; how many times its best level the loss is; the swing (median deviation
            from the trend) as a part of the level.
        text: The same in words.

    """

    kind: Literal["not finite", "divergence", "oscillation"]
    step: int
    number: float
    text: str


class LossCurve:
    """Watches a loss in windows; it is judged at the end of each.

    - Divergence: the mean of a window is above the best one by more than that one's level, and by more than half of
      what had been gained.
    - Oscillation: over two windows the loss does not fall, and either changes sides of its trend in nearly every step,
      or swings four times as wide as it used to.

    Args:
        window: Steps of one window.

    """

    def __init__(self, window: int = 10) -> None:
        self.window = window
        self.steps = 0
        self._means: list[float] = []
        self._swings: list[float] = []
        self._recent: list[float] = []

    def add(self, losses: Iterable[float]) -> Unsteady | None:
        """Go on with the losses of further steps; return the first that is wrong among them."""
        seen: Unsteady | None = None
        for loss in losses:
            self.steps += 1
            if not math.isfinite(loss):
                seen = seen or Unsteady("not finite", self.steps, loss, f"the loss of step {self.steps} is {loss}")
                continue
            self._recent.append(loss)
            if len(self._recent) % self.window == 0:
                seen = self._end_window() or seen
        return seen

    def restart(self) -> None:
        """Forget what a changed learning rate has made old; the best level stays."""
        self._swings, self._recent = [], []

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on, in plain numbers."""
        lists = {"means": list(self._means), "swings": list(self._swings), "recent": list(self._recent)}
        return {"steps": self.steps, **lists}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state_dict`."""
        self.steps = state["steps"]
        self._means, self._swings, self._recent = (list(state[key]) for key in ("means", "swings", "recent"))

    def _end_window(self) -> Unsteady | None:
        window = self._recent[-self.window :]
        self._recent = self._recent[-2 * self.window :]
        seen = self._diverged(fmean(window)) or self._oscillates()
        self._means.append(fmean(window))
        self._swings.append(_swing(_residuals(window)))
        return seen

    def _diverged(self, mean: float) -> Unsteady | None:
        if not self._means:
            return None
        best, first = min(self._means), self._means[0]
        if mean - best <= max(abs(best), (first - best) / 2):
            return None
        ratio = mean / best if best > 0 else math.inf
        text = f"the loss rose from {best:.3g} to {mean:.3g} (means of {self.window} steps) by step {self.steps}"
        return Unsteady("divergence", self.steps, ratio, text)

    def _oscillates(self) -> Unsteady | None:
        if len(self._recent) < 2 * self.window:
            return None
        before, after = self._recent[: self.window], self._recent[self.window :]
        residuals = _residuals(self._recent)
        level, swing = abs(fmean(self._recent)), _swing(residuals)
        if fmean(after) < fmean(before) - swing / 2 or swing < _SWING * level:
            return None
        flips = sum(a * b < 0 for a, b in zip(residuals, residuals[1:], strict=False)) / (len(residuals) - 1)
        earlier = self._swings[:-1]
        wider = len(earlier) >= _KNOWN and swing > _GROWTH * median(earlier) and fmean(after) >= min(self._means[:-1])
        if flips < _FLIPS and not wider:
            return None
        part = swing / level if level else math.inf
        how = f"changes sides in {flips:.0%} of the steps" if flips >= _FLIPS else "swings wider than before"
        text = f"the loss {how}, by {part:.0%} of its level, and does not fall (steps {self._span})"
        return Unsteady("oscillation", self.steps, part, text)

    @property
    def _span(self) -> str:
        return f"{self.steps - len(self._recent) + 1} to {self.steps}"


def _residuals(values: Sequence[float]) -> list[float]:
    """Deviations from a straight line through the medians of both halves, which single spikes do not bend."""
    half = len(values) // 2
    slope = (median(values[-half:]) - median(values[:half])) / (len(values) - half)
    level = [value - slope * i for i, value in enumerate(values)]
    middle = median(level)
    return [value - middle for value in level]


def _swing(residuals: Sequence[float]) -> float:
    """The median deviation, which a single spike does not change."""
    return median(map(abs, residuals))
