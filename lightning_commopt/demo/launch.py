"""Trains on two processes, and sees to it that none stays."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from lightning_commopt.callbacks.report import ReportContent, read_run
from lightning_commopt.demo.network import Network
from lightning_commopt.demo.processes import end, rank_environment, wait_for_all
from lightning_commopt.demo.worker import Training

__all__ = ["RANKS", "run_training"]

RANKS = 2


def run_training(training: Training, network: Network | None, limit_s: float = 1800.0) -> ReportContent:
    """Train and return what it came to.

    Args:
        training: What to do; ``nodes``, ``devices`` and ``out`` are set here.
        network: Entered, with a rank for each process. None: two processes of this machine.
        limit_s: Seconds after which all ranks are killed.

    Raises:
        LaunchError: A rank failed; with the end of what it wrote.

    """
    nodes = 1 if network is None else RANKS
    here = _local_environment() if network is None else {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        out = Path(folder) / "run.json"
        task = replace(training, nodes=nodes, devices=RANKS // nodes, out=str(out))
        command = [sys.executable, "-m", "lightning_commopt.demo.worker", json.dumps(asdict(task))]
        ranks = []
        for rank in range(RANKS):
            log = stack.enter_context((Path(folder) / f"rank{rank}.log").open("w+"))
            process = subprocess.Popen(
                command if network is None else network.inside(rank, command),
                env=here | {"LOCAL_RANK": str(rank)} if network is None else rank_environment(rank, network),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            stack.callback(end, process)
            ranks.append((process, log))
        wait_for_all(ranks, limit_s)
        return read_run(out)


def _local_environment() -> dict[str, str]:
    """Return what Lightning reads where the processes of one machine were started for it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0", "OMP_NUM_THREADS": "1"}
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return os.environ | names | {"PYTHONPATH": path}
