"""The one clock and the counters that statistics, monitors and tuning read."""

from lightning_commopt.measure.clock import Clock, CpuClock, CudaClock, clock_for
from lightning_commopt.measure.comm_stats import CommStats, Traffic
from lightning_commopt.measure.recorder import Recorder
from lightning_commopt.measure.reducer_log import ReducerLog
from lightning_commopt.measure.timeline import Span, Timeline, aligned

__all__ = [
    "Clock",
    "CommStats",
    "CpuClock",
    "CudaClock",
    "Recorder",
    "ReducerLog",
    "Span",
    "Timeline",
    "Traffic",
    "aligned",
    "clock_for",
]
