"""One process a rank, of which none stays."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from lightning_commopt.demo.network import Network

__all__ = ["LaunchError", "end", "rank_environment", "signals_raise", "wait_for_all"]

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


def rank_environment(rank: int, network: Network) -> dict[str, str]:
    """Return what both ``torch.distributed`` and Lightning read: every rank of the network is a node of its own."""
    root = Path(__file__).parents[2]  # children find the package where this process has it
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "NODE_RANK": str(rank),
        "WORLD_SIZE": str(network.ranks),
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])),
    }


def wait_for_all(ranks: Sequence[tuple[subprocess.Popen[bytes], IO[str]]], limit_s: float) -> None:
    """Wait until all ranks have ended well.

    Args:
        ranks: Each process, and the file to which it writes what it has to say.
        limit_s: Seconds until that is an error.

    Raises:
        LaunchError: A rank failed, with the end of what it wrote, or the time is over.

    """
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


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a rank with all its processes, if it still runs; it leads a session of its own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the group is still its own
        process.wait()
