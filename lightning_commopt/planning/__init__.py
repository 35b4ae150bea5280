"""Which division of the work, and which method, before the first run: memory, bytes, predicted steps, and code.

Nothing here needs Lightning or a process group. It builds on the cost model of
:mod:`lightning_commopt.tuning` and the schedules of :mod:`lightning_commopt.pipeline`.
"""

from lightning_commopt.planning.cluster import Cluster
from lightning_commopt.planning.job import Model, Training
from lightning_commopt.planning.layouts import Layout, layouts
from lightning_commopt.planning.memory import Memory, memory
from lightning_commopt.planning.planner import Ranking, plan, remedies
from lightning_commopt.planning.rows import Row
from lightning_commopt.planning.stepping import simulate_step
from lightning_commopt.planning.trainer_code import trainer_code

__all__ = [
    "Cluster",
    "Layout",
    "Memory",
    "Model",
    "Ranking",
    "Row",
    "Training",
    "layouts",
    "memory",
    "plan",
    "remedies",
    "simulate_step",
    "trainer_code",
]
