"""Looks for the usual faults of a distributed fit."""

from lightning_commopt.callbacks.doctor.doctor import DistributedDoctor
from lightning_commopt.callbacks.doctor.finding import Finding

__all__ = ["DistributedDoctor", "Finding"]
