"""Pipeline parallelism: what each rank computes and sends, and when."""

from lightning_commopt.pipeline.actions import Action, Kind, Schedule
from lightning_commopt.pipeline.balance import balance
from lightning_commopt.pipeline.messages import Message
from lightning_commopt.pipeline.named import ScheduleName, ideal_bubble, schedule_named
from lightning_commopt.pipeline.rendezvous import DeadlockError, check_rendezvous
from lightning_commopt.pipeline.schedules import gpipe, interleaved, one_f_one_b, zero_bubble_v
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
    "ScheduleName",
    "Send",
    "Simulation",
    "StageCost",
    "balance",
    "check_rendezvous",
    "gpipe",
    "ideal_bubble",
    "interleaved",
    "lower",
    "one_f_one_b",
    "peak_activations",
    "schedule_named",
    "simulate",
    "zero_bubble_v",
]
