"""Starts a process a rank, each in its namespace, and sees to it that none stays."""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from benchmarks.links.rank import Task
from benchmarks.links.record import Run
from lightning_commopt.demo.network import Network
from lightning_commopt.demo.processes import LaunchError, end, rank_environment, signals_raise, wait_for_all

__all__ = ["LaunchError", "launch", "signals_raise"]

_ROOT = Path(__file__).parents[2]


def launch(network: Network, module: str, task: Task, limit_s: float) -> Run:
    """Run ``module`` on every rank of a network and return what rank 0 wrote.

    Args:
        network: Entered; one rank of it for each of the task's.
        module: A module of this package that runs as a script.
        task: What to do; ``out`` is set here.
        limit_s: Seconds after which all ranks are killed.

    Raises:
        LaunchError: A rank failed; with the end of what it wrote.

    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        out = Path(folder) / "run.json"
        ranks = []
        for rank in range(task.ranks):
            log = stack.enter_context((Path(folder) / f"rank{rank}.log").open("w+"))
            process = subprocess.Popen(
                network.inside(rank, [sys.executable, "-m", module, json.dumps(asdict(task) | {"out": str(out)})]),
                env=rank_environment(rank, network) | {"LINKS_LAUNCHER": str(os.getpid())},
                cwd=_ROOT,
                stdout=log,
                stderr=None if rank == 0 else log,
                start_new_session=True,
            )
            stack.callback(end, process)
            ranks.append((process, log))
        wait_for_all(ranks, limit_s)
        return Run.read(out)
