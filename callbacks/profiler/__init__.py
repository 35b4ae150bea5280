"""Profiles a few steps: computing, communicating, and both at once."""

from lightning_commopt.callbacks.profiler.comm_profiler import CommProfiler
from lightning_commopt.callbacks.profiler.trace import TraceTimes

__all__ = ["CommProfiler", "TraceTimes"]
