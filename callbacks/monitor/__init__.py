"""Measures a fit: computing, communicating, waiting."""

from lightning_commopt.callbacks.monitor.averages import RankTimes, StepAverages
from lightning_commopt.callbacks.monitor.comm_monitor import CommMonitor
from lightning_commopt.callbacks.monitor.summary import CommSummary

__all__ = ["CommMonitor", "CommSummary", "RankTimes", "StepAverages"]
