"""Starts a process a rank, each in its namespace, and sees to it that none stays."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO

from benchmarks.links.network import Network
from benchmarks.links.rank import Task
from benchmarks.links.record import Run

__all__ = ["LaunchError", "launch", "signals_raise"]

_ROOT = Path(__file__).parents[2]
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PORT = 29500  # free in every namespace: nothing else runs there


class LaunchError(RuntimeError):
    """A rank failed, or the run took too long."""


@contextmanager
def signals_raise() -> Iterator[None]:
    """Make signals that end a process raise ``SystemExit``, once, so that everything is taken down."""

    def leave(number: int, _: object) -> None:
        for ending in _ENDING:
            signal.signal(ending, signal.SIG_IGN)
        sys.exit(128 + number)

    before = {number: signal.getsignal(number) for number in _ENDING}
    for number in _ENDING:
        if number != signal.SIGHUP or before[number] != signal.SIG_IGN:  # ignored: run by nohup
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
                env=_environment(rank, task.ranks, network),
                cwd=_ROOT,
                stdout=log,
                stderr=None if rank == 0 else log,
                start_new_session=True,
            )
            stack.callback(_end, process)
            ranks.append((process, log))
        _wait(ranks, limit_s)
        return Run.read(out)


def _environment(rank: int, ranks: int, network: Network) -> dict[str, str]:
    """Return what both ``torch.distributed`` and Lightning read: every rank is a node of its own."""
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "NODE_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
        "LINKS_LAUNCHER": str(os.getpid()),
    }


def _wait(ranks: Sequence[tuple[subprocess.Popen[bytes], IO[str]]], limit_s: float) -> None:
    """Wait until all ranks have ended well."""
    deadline = time.monotonic() + limit_s
    while any(process.poll() is None for process, _ in ranks):
        for rank, (process, log) in enumerate(ranks):
            if process.poll():
                log.seek(0)
                raise LaunchError(f"Rank {rank} ended with {process.returncode}.\n{log.read()[-3000:]}")
        if time.monotonic() > deadline:
            raise LaunchError(f"The run did not end within {limit_s:.0f} s.")
        time.sleep(0.1)
    if bad := [rank for rank, (process, _) in enumerate(ranks) if process.returncode]:
        raise LaunchError(f"Ranks {bad} failed.")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a rank with all its processes, if it still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the group is still its own
        process.wait()
