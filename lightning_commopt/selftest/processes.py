"""The ranks of a self-test: those that torchrun started, or processes of its own on this machine."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_commopt.selftest.run import Report, run_laws

__all__ = ["launched", "run_in_processes", "run_on_ranks"]

_HOST = "127.0.0.1"
_END_S = 20.0


def launched() -> bool:
    """Whether a launcher started this process as one of several ranks."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def run_on_ranks(device: str, methods: Sequence[str], ranks_per_node: int | None, timeout: timedelta) -> Report:
    """Test all laws between the ranks of torchrun."""
    _take_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(_backend(device), timeout=timeout)
    try:
        return run_laws(device, methods=methods, ranks_per_node=ranks_per_node, timeout=timeout)
    finally:
        dist.destroy_process_group()


def run_in_processes(
    processes: int, device: str, methods: Sequence[str], ranks_per_node: int | None, timeout: timedelta
) -> Report:
    """Start further processes, be rank 0 among them, and test all laws."""
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    options = {
        "port": store.port,
        "world": processes,
        "device": device,
        "methods": list(methods),
        "ranks_per_node": ranks_per_node,
        "timeout_s": timeout.total_seconds(),
    }
    with _others(processes, options):
        return _be_rank(0, store, **options)


def be_further_rank(rank: int, **options: object) -> None:
    """Be one of the processes that :func:`run_in_processes` starts."""
    store = dist.TCPStore(_HOST, options["port"], is_master=False)  # type: ignore[arg-type]
    _be_rank(rank, store, **options)  # type: ignore[arg-type]


def _be_rank(
    rank: int,
    store: dist.TCPStore,
    *,
    port: int,
    world: int,
    device: str,
    methods: Sequence[str],
    ranks_per_node: int | None,
    timeout_s: float,
) -> Report:
    timeout = timedelta(seconds=timeout_s)
    torch.set_num_threads(1)
    _take_device(device, rank)
    dist.init_process_group(_backend(device), store=store, rank=rank, world_size=world, timeout=timeout)
    try:
        return run_laws(device, methods=methods, ranks_per_node=ranks_per_node, timeout=timeout)
    finally:
        dist.destroy_process_group()


@contextmanager
def _others(processes: int, options: dict[str, object]) -> Iterator[None]:
    """Keep the ranks from 1 on; none is left in the end."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lightning_commopt.selftest"]
    started = [
        subprocess.Popen([*command, json.dumps({"rank": rank, **options})], env=environment, stdout=sys.stderr.fileno())
        for rank in range(1, processes)
    ]
    try:
        yield
        for child in started:
            child.wait(_END_S)
    finally:
        for child in started:
            if child.poll() is None:
                child.kill()
                child.wait()


def _take_device(device: str, local_rank: int) -> None:
    if device == "cuda":
        torch.cuda.set_device(local_rank)


def _backend(device: str) -> str:
    return "nccl" if device == "cuda" else "gloo"
