"""Tests every law over every method, and keeps what each rank saw."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from lightning_commopt.routes import ControlGroup, Topology, discover
from lightning_commopt.selftest.case import Case
from lightning_commopt.selftest.ground import Ground
from lightning_commopt.selftest.laws import LAWS, Law, cases_for

__all__ = ["Fault", "Outcome", "Report", "run_laws"]

Status = Literal["passed", "FAILED", "not applicable", "not run"]


@dataclass(frozen=True)
class Fault:
    """What a rank saw wrong."""

    rank: int
    text: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.text}"


@dataclass(frozen=True)
class Outcome:
    """What came of one law for one method.

    Args:
        method: The method, and the size of a node where it travelled between nodes.
        law: The law.
        status: ``"passed"``, ``"FAILED"``, ``"not applicable"`` or ``"not run"``.
        faults: What was seen, by rank.

    """

    method: str
    law: str
    status: Status
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True)
class Report:
    """All outcomes of a run; the same on every rank unless one failed to answer.

    Args:
        world: Number of ranks.
        device: ``cpu`` or ``cuda``.
        backend: Of the process group.
        routes: How each method travelled.
        hierarchy: Why nothing travelled between nodes; empty where it did.
        outcomes: By method, then by law.

    """

    world: int
    device: str
    backend: str
    routes: dict[str, str]
    hierarchy: str
    outcomes: tuple[Outcome, ...]

    @property
    def failed(self) -> list[Outcome]:
        """The laws that did not hold."""
        return [outcome for outcome in self.outcomes if outcome.status == "FAILED"]


def run_laws(
    device: str,
    *,
    methods: Sequence[str] = (),
    ranks_per_node: int | None = None,
    timeout: timedelta | None = None,
) -> Report:
    """Test all laws between the ranks of the default process group. A collective.

    Args:
        device: ``cpu`` with gloo, ``cuda`` with NCCL.
        methods: Words; none for all.
        ranks_per_node: As if so many consecutive ranks shared a node; None to find out.
        timeout: Until a rank that does not answer ends the others.

    Raises:
        ValueError: There is one rank, or ``ranks_per_node`` does not divide their number.

    """
    if dist.get_world_size() < 2:
        raise ValueError("The laws are about several ranks: at least 2 processes are needed.")
    ground = Ground(ControlGroup(timeout), device, timeout)
    topology = discover("auto" if ranks_per_node is None else ranks_per_node, ground.control)
    cases = cases_for(methods, topology.ranks_per_node if topology.hierarchical else 0)
    outcomes = tuple(_outcomes(cases, ground))
    return Report(
        world=ground.control.world,
        device=device,
        backend=dist.get_backend(),
        routes={case.id: _route(case, topology) for case in cases},
        hierarchy=topology.reason,
        outcomes=outcomes,
    )


def _outcomes(cases: Sequence[Case], ground: Ground) -> Iterator[Outcome]:
    """Yield what came of each; after a rank raised, nobody can go on."""
    broken = False
    for case in cases:
        for law in LAWS:
            if broken:
                yield Outcome(case.id, law.name, "not run")
                continue
            outcome = _checked(law, case, ground)
            broken = outcome is None
            yield outcome or Outcome(case.id, law.name, "FAILED", tuple(_raised()))


def _checked(law: Law, case: Case, ground: Ground) -> Outcome | None:
    """Return what all ranks saw; None where this rank, or one that it waited for, raised."""
    try:
        torch.manual_seed(0)
        by_rank = ground.control.all_gather(law.check(case, ground))
    except Exception as error:
        _tell(f"{type(error).__name__}: {str(error).strip()}", law, case)
        return None
    faults = tuple(Fault(rank, text) for rank, texts in enumerate(by_rank) for text in texts)
    return Outcome(case.id, law.name, "FAILED" if faults else "passed", faults)


def _tell(error: str, law: Law, case: Case) -> None:
    """Leave word of what this rank raised; the first to do so is the likely cause."""
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    number = store.add("lightning_commopt/selftest/raised", 1)
    store.set(f"lightning_commopt/selftest/raised/{number}", f"{rank} {error.splitlines()[0]}")
    print(f"commopt doctor: law `{law.name}`, method `{case.id}`, rank {rank}: {error}", file=sys.stderr, flush=True)


def _raised() -> Iterator[Fault]:
    store = dist.distributed_c10d._get_default_store()
    for number in range(1, store.add("lightning_commopt/selftest/raised", 0) + 1):
        rank, text = store.get(f"lightning_commopt/selftest/raised/{number}").decode().split(" ", 1)
        yield Fault(int(rank), text)


def _route(case: Case, topology: Topology) -> str:
    if case.hierarchy:
        return f"reduced inside nodes of {case.hierarchy}, encoded between {topology.nodes}"
    if case.method.summable:
        return "all-reduce"
    return "one all-gather" if dist.get_world_size() == 2 else "all-to-all, then all-gather"
