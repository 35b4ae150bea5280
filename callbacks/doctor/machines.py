"""What the ranks of a cluster run on, without a fit."""

import os
import platform
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from lightning_commopt.callbacks.doctor.environment import RankFacts, facts_of_rank, problems
from lightning_commopt.callbacks.doctor.finding import Finding
from lightning_commopt.routes import ControlGroup

__all__ = ["Machine", "clock_offsets", "examine", "machine"]

_PACKAGES = ("lightning-commopt", "lightning", "torch", "numpy", "numba", "triton", "deepspeed", "ray")
_CLOCK_S = 1.0
_CLOCK_READINGS = 5


@dataclass(frozen=True)
class Machine:
    """What one rank runs on.

    Args:
        facts: Node, network and variables.
        versions: Of Python and packages; those that are not installed are left out.
        system: Operating system.
        cores: Of the CPU, that this process may use.
        gpus: Name and memory of each GPU that this process sees.
        backends: Of ``torch.distributed``, in this build.

    """

    facts: RankFacts
    versions: Mapping[str, str]
    system: str
    cores: int
    gpus: tuple[str, ...]
    backends: tuple[str, ...]


def machine() -> Machine:
    """Describe what this process runs on."""
    gpus = torch.cuda.device_count()
    has_nccl = dist.is_nccl_available()
    return Machine(
        facts=facts_of_rank("nccl" if gpus and has_nccl else "gloo", workers=False),
        versions=_versions(),
        system=platform.platform(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        gpus=tuple(_gpu(index) for index in range(gpus)),
        backends=tuple(
            name
            for name, available in (
                ("gloo", dist.is_gloo_available()),
                ("nccl", has_nccl),
                ("mpi", dist.is_mpi_available()),
                ("ucc", dist.is_ucc_available()),
            )
            if available
        ),
    )


def clock_offsets(control: ControlGroup) -> list[float]:
    """Return by how many seconds each rank's clock is ahead of rank 0's, as a barrier can tell. A collective."""
    readings = []
    for _ in range(_CLOCK_READINGS):
        control.barrier()
        readings.append(control.all_gather(time.time()))
    return [statistics.median(times[rank] - times[0] for times in readings) for rank in range(control.world)]


def examine(machines: Sequence[Machine], offsets: Sequence[float]) -> list[Finding]:
    """Say what is wrong with the machines of a cluster.

    Args:
        machines: By rank.
        offsets: Of clocks, by rank, s.

    """
    found = [
        Finding("network", True, text, rank, number, remedy)
        for (text, remedy), rank, number in problems([machine.facts for machine in machines])
    ]
    found += [*_different_versions(machines), *_without_nccl(machines), *_clocks(offsets)]
    for check, words in _FINE.items():
        if check not in {finding.check for finding in found}:
            lonely = len(machines) == 1 and check in _COMPARED
            found.append(Finding(check, False, _ALONE if lonely else words, checked=not lonely))
    return found


_FINE = {
    "network": "variables, interfaces and shared memory are as they should be",
    "versions": "alike on all ranks",
    "GPUs": "this build of torch can use all that there are",
    "clocks": f"within {_CLOCK_S:g} s of each other",
}
_COMPARED = ("versions", "clocks")
_ALONE = "one rank: start the command on all by torchrun to compare them"


def _different_versions(machines: Sequence[Machine]) -> Iterator[Finding]:
    first = machines[0].versions
    for rank, other in enumerate(machines):
        for name in sorted(first.keys() | other.versions.keys()):
            mine, theirs = other.versions.get(name, "not there"), first.get(name, "not there")
            if mine != theirs:
                text = f"{name} is {mine} on rank {rank}, and {theirs} on rank 0"
                yield Finding("versions", True, text, rank, remedy="install the same everywhere, or use one container")


def _without_nccl(machines: Sequence[Machine]) -> Iterator[Finding]:
    for rank, other in enumerate(machines):
        if other.gpus and "nccl" not in other.backends:
            yield Finding(
                "GPUs",
                True,
                f"rank {rank} sees {len(other.gpus)} GPUs, and its build of torch has no NCCL",
                rank,
                remedy="install a CUDA build of torch",
            )


def _clocks(offsets: Sequence[float]) -> Iterator[Finding]:
    for rank, offset in enumerate(offsets):
        if abs(offset) > _CLOCK_S:
            text = f"the clock of rank {rank} is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} rank 0's"
            yield Finding(
                "clocks", True, text, rank, offset, "run chrony or NTP, or logs of ranks cannot be put side by side"
            )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available() and dist.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    return f"{properties.name}, {properties.total_memory / 1e9:.0f} GB"
