"""Pipeline parallelism: what each rank computes and sends, and when."""

from lightning_commopt.pipeline.actions import Action, Kind, Schedule
from lightning_commopt.pipeline.balance import balance
from lightning_commopt.pipeline.messages import Message
from lightning_commopt.pipeline.rendezvous import DeadlockError, check_rendezvous
from lightning_commopt.pipeline.schedules import gpipe, one_f_one_b
from lightning_commopt.pipeline.simulate import Simulation, StageCost, peak_activations, simulate
from lightning_commopt.pipeline.transfers import Operation, Receive, Send, lower

__all__ = [
    "Action",
    "DeadlockError",
    "Kind",
    "Message",
    "Operation",
    "Receive",
    "Schedule",
    "Send",
    "Simulation",
    "StageCost",
    "balance",
    "check_rendezvous",
    "gpipe",
    "lower",
    "one_f_one_b",
    "peak_activations",
    "simulate",
]
