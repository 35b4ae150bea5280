"""The ranks of a command: those of a launcher, or processes of this machine that the command starts itself."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_commopt.cli.errors import UsageError

__all__ = ["device_of_rank", "joined_ranks"]

_TIMEOUT = timedelta(minutes=3)
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def joined_ranks(processes: int, words: Sequence[str]) -> Iterator[torch.device]:
    """Join the default process group; where no launcher made this process a rank, start the other ones and be rank 0.

    Args:
        processes: How many, where no launcher says so.
        words: Command line of the other processes, after ``python -m lightning_commopt.cli``.

    Yields:
        This rank's device.

    Raises:
        UsageError: A launcher's variables are not complete, or there are fewer than two processes.

    """
    given = [name for name in _LAUNCHED if name in os.environ]
    if given and len(given) < len(_LAUNCHED):
        missing = next(name for name in _LAUNCHED if name not in os.environ)
        raise UsageError(
            f"`{given[0]}` is set and `{missing}` is not: start every rank by torchrun, or unset `{given[0]}`."
        )
    world = int(os.environ["WORLD_SIZE"]) if given else processes
    if world < 2:
        raise UsageError(f"{world} process has nobody to talk to: start at least 2, by `--processes 2` or by torchrun.")
    others: list[subprocess.Popen[bytes]] = []
    before = dict(os.environ)
    try:
        if not given:
            os.environ.update(_environment(processes))
            others = [_started(rank, words) for rank in range(1, processes)]
            os.environ.update({"RANK": "0", "LOCAL_RANK": "0"})
        device = device_of_rank()
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=_TIMEOUT)
        try:
            yield device
        finally:
            dist.destroy_process_group()
        for other in others:
            other.wait(timeout=_TIMEOUT.total_seconds())
    finally:
        for other in others:
            other.kill()
            other.wait()
        os.environ.clear()
        os.environ.update(before)


def device_of_rank() -> torch.device:
    """Return this rank's GPU where the node has one for each of its ranks, else the CPU. It becomes the current one."""
    local, on_node = (int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if torch.cuda.device_count() >= max(1, on_node):
        torch.cuda.set_device(local)
        return torch.device("cuda", local)
    torch.set_num_threads(1)
    return torch.device("cpu")


def _environment(processes: int) -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    return {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
    }


def _started(rank: int, words: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "lightning_commopt.cli", *words]
    return subprocess.Popen(command, env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=2)
