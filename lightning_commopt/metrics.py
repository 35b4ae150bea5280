"""Metrics of communication for people who log by hand: torchmetrics, synchronised over ranks as all of them are."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

__all__ = ["CommRatio", "ScalingEfficiency", "Throughput"]


class _PartOfStep(Metric):
    """A part of the time of steps, over ranks and updates."""

    is_differentiable = False
    full_state_update = False

    part_ms: Tensor
    step_ms: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for state in ("part_ms", "step_ms"):
            self.add_state(state, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    @override
    def compute(self) -> Tensor:
        return self.part_ms / self.step_ms

    def _add(self, name: str, part_ms: float, step_ms: float) -> None:
        if not 0 <= part_ms <= step_ms:
            raise ValueError(f"`{name}={part_ms}` must be between 0 and `step_ms={step_ms}`.")
        self.part_ms += part_ms
        self.step_ms += step_ms


class CommRatio(_PartOfStep):
    """Part of a step in which communication is exposed: nothing is left to compute and gradients still travel.

    Over 0.3 it is worth optimising.

    >>> metric = CommRatio()
    >>> metric.update(exposed_ms=30.0, step_ms=100.0)
    >>> metric.update(exposed_ms=10.0, step_ms=100.0)
    >>> metric.compute().item()
    0.2
    """

    higher_is_better = False

    @override
    def update(self, exposed_ms: float, step_ms: float) -> None:
        """Add a step, or several.

        Args:
            exposed_ms: Exposed communication, such as the increase of ``trainer.strategy.comm_stats().exposed_ms``.
            step_ms: Wall time of the same steps.

        Raises:
            ValueError: The first is negative or longer than the second.

        """
        self._add("exposed_ms", exposed_ms, step_ms)


class ScalingEfficiency(_PartOfStep):
    """Throughput over that of as many ranks that need not talk to each other: compute over step.

    >>> metric = ScalingEfficiency()
    >>> metric.update(compute_ms=80.0, step_ms=100.0)
    >>> metric.compute().item()
    0.8
    """

    higher_is_better = True

    @override
    def update(self, compute_ms: float, step_ms: float) -> None:
        """Add a step, or several.

        Args:
            compute_ms: The time of a step without communication and waiting.
            step_ms: Wall time of the same steps.

        Raises:
            ValueError: The first is negative or longer than the second.

        """
        self._add("compute_ms", compute_ms, step_ms)


class Throughput(Metric):
    """Samples a second of all ranks together.

    >>> metric = Throughput()
    >>> metric.update(samples=32, seconds=0.5)
    >>> metric.compute().item()
    64.0
    """

    is_differentiable = False
    full_state_update = False
    higher_is_better = True

    samples: Tensor
    seconds: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("samples", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state(
            "seconds", torch.zeros((), dtype=torch.float64), dist_reduce_fx="mean"
        )  # ranks work side by side

    @override
    def update(self, samples: int, seconds: float) -> None:
        """Add what this rank did.

        Args:
            samples: Samples of this rank.
            seconds: In which it took them.

        Raises:
            ValueError: One of them is negative.

        """
        if samples < 0 or seconds < 0:
            raise ValueError(f"`samples={samples}` and `seconds={seconds}` must not be negative.")
        self.samples += samples
        self.seconds += seconds

    @override
    def compute(self) -> Tensor:
        return self.samples / self.seconds
