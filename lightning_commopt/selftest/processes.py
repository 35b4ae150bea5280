"""The ranks of a self-test: those that torchrun started, or processes of its own on this machine."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from lightning_commopt.selftest.run import Report, run_laws

__all__ = ["Wanted", "be_further_rank", "is_launched", "run_in_processes", "run_on_ranks"]

_HOST = "127.0.0.1"
_END_S = 20.0


@dataclass(frozen=True)
class Wanted:
    """What is to be tested.

    Args:
        device: ``cpu`` or ``cuda``.
        methods: Words; none for all.
        ranks_per_node: As if so many consecutive ranks shared a node; None to find out.
        timeout_s: Until a rank that does not answer ends the others.

    """

    device: str
    methods: tuple[str, ...] = ()
    ranks_per_node: int | None = None
    timeout_s: float = 60.0

    @property
    def backend(self) -> str:
        """Of the process group."""
        return "nccl" if self.device == "cuda" else "gloo"

    @property
    def timeout(self) -> timedelta:
        """The time-out of all groups."""
        return timedelta(seconds=self.timeout_s)

    def run(self) -> Report:
        """Test in the default process group, and leave it. A collective."""
        try:
            return run_laws(self.device, methods=self.methods, ranks_per_node=self.ranks_per_node, timeout=self.timeout)
        finally:
            dist.destroy_process_group()


def is_launched() -> bool:
    """Whether a launcher such as torchrun made this process one of several ranks."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def run_on_ranks(wanted: Wanted) -> Report:
    """Test all laws between the ranks of torchrun."""
    _take_device(wanted, int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(wanted.backend, timeout=wanted.timeout)
    return wanted.run()


def run_in_processes(processes: int, wanted: Wanted) -> Report:
    """Start further processes, be rank 0 among them, and test all laws."""
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=wanted.timeout)
    with _others(processes, store.port, wanted):
        return _be_rank(0, processes, store, wanted)


def be_further_rank(order: str) -> int:
    """Be one of the processes that :func:`run_in_processes` starts, and return the exit code."""
    given = json.loads(order)
    store = TCPStore(_HOST, given["port"], is_master=False)
    wanted = given["wanted"]
    report = _be_rank(given["rank"], given["world"], store, Wanted(**wanted | {"methods": tuple(wanted["methods"])}))
    return int(bool(report.failed))


def _be_rank(rank: int, world: int, store: TCPStore, wanted: Wanted) -> Report:
    torch.set_num_threads(1)
    _take_device(wanted, rank)
    dist.init_process_group(wanted.backend, store=store, rank=rank, world_size=world, timeout=wanted.timeout)
    return wanted.run()


@contextmanager
def _others(processes: int, port: int, wanted: Wanted) -> Iterator[None]:
    """Keep the ranks from 1 on; none is left in the end."""
    started = []
    for rank in range(1, processes):
        order = json.dumps({"rank": rank, "world": processes, "port": port, "wanted": asdict(wanted)})
        command = [sys.executable, "-m", "lightning_commopt.selftest", order]
        started.append(subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=2))
    try:
        yield
        for child in started:
            child.wait(_END_S)
    finally:
        for child in started:
            if child.poll() is None:
                child.kill()
                child.wait()


def _take_device(wanted: Wanted, local_rank: int) -> None:
    if wanted.device == "cuda":
        torch.cuda.set_device(local_rank)
