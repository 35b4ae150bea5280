"""Pipeline parallelism: what each rank computes and sends, and when."""

from lightning_commopt.pipeline.actions import Action, Kind, Schedule
from lightning_commopt.pipeline.balance import balance
from lightning_commopt.pipeline.schedules import gpipe, one_f_one_b

__all__ = ["Action", "Kind", "Schedule", "balance", "gpipe", "one_f_one_b"]
