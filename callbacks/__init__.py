"""Callbacks that measure and report how ranks work together."""

if __name__ != "lightning_commopt.callbacks":
    raise ImportError(
        f"The package was imported as `{__name__}`, which is only the folder of its source. "
        "Import `lightning_commopt.callbacks` instead."
    )

from lightning_commopt.callbacks.doctor import DistributedDoctor, Finding
from lightning_commopt.callbacks.lr_scaling import LinearLRScaling
from lightning_commopt.callbacks.monitor import CommMonitor, CommSummary, RankTimes, StepAverages
from lightning_commopt.callbacks.profiler import CommProfiler, TraceTimes

__all__ = [
    "CommMonitor",
    "CommProfiler",
    "CommSummary",
    "DistributedDoctor",
    "Finding",
    "LinearLRScaling",
    "RankTimes",
    "StepAverages",
    "TraceTimes",
]
