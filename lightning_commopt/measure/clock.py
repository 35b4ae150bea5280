"""One clock for the host and for CUDA."""

import time
from abc import ABC, abstractmethod
from typing import Any

import torch
from typing_extensions import override

__all__ = ["Clock", "CpuClock", "CudaClock", "clock_for"]


class Clock(ABC):
    """Takes marks in the course of the work and tells the time between two of them later, without stopping it."""

    @abstractmethod
    def mark(self) -> Any:
        """Mark this point of the current thread (CPU) or stream (CUDA)."""

    def later(self, mark: Any, other: Any) -> Any:
        """Return the later of two marks; on CUDA, whose collectives follow each other, the first."""
        return mark

    def known_ms(self, start: Any, end: Any) -> float | None:
        """Return the milliseconds between two marks where they are known at once, else None."""
        return None

    def after(self, mark: Any, ms: float) -> Any:
        """Return the mark so many milliseconds after one; on CUDA, where nobody asks, the mark."""
        return mark

    @abstractmethod
    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Return the milliseconds between two marks, waiting until both have passed."""


class CpuClock(Clock):
    """Wall time of the calling thread."""

    @override
    def mark(self) -> float:
        return time.perf_counter()

    @override
    def later(self, mark: float, other: float) -> float:
        return max(mark, other)

    @override
    def known_ms(self, start: float, end: float) -> float:
        return self.elapsed_ms(start, end)

    @override
    def after(self, mark: float, ms: float) -> float:
        return mark + ms / 1e3

    @override
    def elapsed_ms(self, start: float, end: float) -> float:
        return (end - start) * 1e3


class CudaClock(Clock):
    """Events on the current CUDA stream."""

    @override
    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @override
    def elapsed_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end))


def clock_for(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return CudaClock() if device.type == "cuda" else CpuClock()
