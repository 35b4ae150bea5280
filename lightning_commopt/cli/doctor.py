"""``commopt doctor``."""

import os
from dataclasses import asdict
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from lightning_commopt.cli.errors import UsageError
from lightning_commopt.cli.output import Answer, Table
from lightning_commopt.cli.units import listed
from lightning_commopt.compression import METHODS
from lightning_commopt.routes import ControlGroup
from lightning_commopt.selftest.laws import LAWS
from lightning_commopt.selftest.processes import Wanted, is_launched, run_in_processes, run_on_ranks
from lightning_commopt.selftest.run import Report

__all__ = ["doctor"]


def doctor(
    selftest: bool = False,
    compare: str | None = None,
    steps: int = 10,
    tolerance: float = 0.05,
    processes: int = 2,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    methods: str = "",
    ranks_per_node: int | None = None,
    timeout: float = 60.0,
) -> Answer | None:
    """Is everything all right with these machines, and with my run on them?

    Where it runs and what is wrong there, in seconds; alike on all ranks under torchrun:

        commopt doctor

    What the product promises, tested between ranks here, in about a minute, without data or model:

        commopt doctor --selftest
        torchrun --nnodes 2 --nproc-per-node 8 ... -m lightning_commopt.cli doctor --selftest

    The first steps of your own run: data, seeds, gradients, replicas, and whether one process would have had the same
    losses. `make_trainer()` in your script returns (trainer, model) or (trainer, model, data), and calls no fit:

        commopt doctor --compare train.py:make_trainer

    Exit code 1: something was found.

    Args:
        selftest: Test what the product promises, for every method: nothing is lost, replicas are equal, bytes sent are
            bytes promised, and so on.
        compare: Function that makes your Trainer and model, as script.py:function.
        steps: Optimizer steps to take, and to repeat in one process (--compare).
        tolerance: Difference of the two losses that is no finding, as a part of them (--compare).
        processes: Ranks to start on this machine, where torchrun has started none.
        device: Where gradients are: cpu (gloo) or cuda (NCCL); auto takes cuda where there is a GPU for each process.
        methods: Only these methods, such as int8,topk; all by default.
        ranks_per_node: Test as if so many ranks shared a node; by default as they do.
        timeout: Seconds until a rank that does not answer ends the test.

    """
    if selftest and compare is not None:
        raise UsageError("`--selftest` and `--compare` are two examinations: ask for one.")
    if compare is not None:
        return _compare(compare, steps, tolerance)
    if selftest:
        return _selftest(processes, device, methods, ranks_per_node, timeout)
    return _machines(timeout)


def _machines(timeout_s: float) -> Answer | None:
    from lightning_commopt.callbacks.doctor.machines import clock_offsets, examine, machine
    from lightning_commopt.callbacks.doctor.table import lines

    machines, offsets = [machine()], [0.0]
    if is_launched():
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", timeout=timeout)
        control = ControlGroup(timeout)
        machines, offsets = control.all_gather(machines[0]), clock_offsets(control)
        dist.destroy_process_group()
        if control.rank:
            return None
    findings = examine(machines, offsets)
    first, facts = machines[0], machines[0].facts
    nodes = len({m.facts.node for m in machines})
    shared = "none" if facts.shared_memory is None else f"{facts.shared_memory / 1e9:.3g} GB"
    rows = [
        ["ranks", f"{len(machines)} on {nodes} node{'s' * (nodes > 1)}; what follows is rank 0's"],
        *([name, number] for name, number in first.versions.items()),
        ["system", first.system],
        ["cores", str(first.cores)],
        ["GPUs", "; ".join(first.gpus) or "none"],
        ["backends", ", ".join(first.backends)],
        ["interface", facts.interface],
        ["InfiniBand", "yes" if facts.infiniband else "no"],
        ["shared memory", shared],
        *([name, value] for name, value in facts.variables.items()),
    ]
    found = any(finding.found for finding in findings)
    data = {"ranks": machines, "clock_offsets_s": offsets, "found": found, "findings": findings}
    rest = "Next: `commopt doctor --selftest`, `commopt probe` for the links, `--compare` for your own run."
    return Answer(data, [Table("commopt doctor", ["what", "here"], rows), *lines(findings), rest], code=int(found))


def _compare(words: str, steps: int, tolerance: float) -> Answer | None:
    if steps < 1 or tolerance < 0:
        raise UsageError("`--steps` must be at least 1, and `--tolerance` at least 0.")
    from lightning_commopt.callbacks.doctor.table import report
    from lightning_commopt.trials import Target, TargetError
    from lightning_commopt.trials.compare import compare

    try:
        examined = compare(Target(words), steps, tolerance)
    except TargetError as error:
        raise UsageError(str(error)) from None
    if examined is None:
        return None
    findings = [{**asdict(finding), "status": finding.status} for finding in examined.findings]
    data = {"when": examined.when, "found": examined.found, "findings": findings}
    return Answer(data, [report(examined.findings, examined.when)], code=int(examined.found))


def _selftest(processes: int, device: str, methods: str, ranks_per_node: int | None, timeout_s: float) -> Answer | None:
    chosen = tuple(listed("methods", methods))
    if unknown := [name for name in chosen if name not in METHODS]:
        raise UsageError(f"`--methods {unknown[0]}` is no method: choose from {', '.join(METHODS)}.")
    if timeout_s <= 0:
        raise UsageError(f"`--timeout {timeout_s:g}` must be a number of seconds above 0.")
    world = int(os.environ["WORLD_SIZE"]) if is_launched() else processes
    if world < 2:
        raise UsageError("The laws are about several ranks: set `--processes` to 2 or more.")
    if ranks_per_node is not None and (ranks_per_node < 1 or world % ranks_per_node):
        raise UsageError(f"`--ranks-per-node {ranks_per_node}` must divide the number of ranks, which is {world}.")
    wanted = Wanted(_device(device, processes), chosen, ranks_per_node, timeout_s)
    report = run_on_ranks(wanted) if is_launched() else run_in_processes(processes, wanted)
    return _laws(report) if int(os.environ.get("RANK", "0")) == 0 else None


def _device(device: str, processes: int) -> str:
    """Return where gradients are, of which there is one for each process of this machine."""
    needed = 1 if is_launched() else processes
    if device == "cuda" and torch.cuda.device_count() < needed:
        raise UsageError(
            f"`--device cuda` needs a GPU for each of {needed} processes, and there are {torch.cuda.device_count()}: "
            "set `--processes`, or take `--device cpu`."
        )
    if device == "auto":
        return "cuda" if torch.cuda.device_count() >= needed else "cpu"
    return device


def _laws(report: Report) -> Answer:
    """Lay out methods and laws."""
    status = {(outcome.method, outcome.law): outcome.status for outcome in report.outcomes}
    rows = [[method, *(status[method, law.name] for law in LAWS), route] for method, route in report.routes.items()]
    where = f"{report.world} ranks, {report.device}, {report.backend}"
    table = Table(f"commopt doctor --selftest: {where}", ["method", *(law.name for law in LAWS), "route"], rows)
    faults = [f"FAILED `{o.law}`, {o.method}: {fault}" for o in report.failed for fault in o.faults]
    between = [f"Between nodes: not applicable, {report.hierarchy}."] if report.hierarchy else []
    passed = sum(outcome.status == "passed" for outcome in report.outcomes)
    verdict = f"{len(report.failed)} FAILED" if report.failed else "every law holds"
    shown: list[Table | str] = [
        table,
        *faults,
        *between,
        "Laws: " + "; ".join(f"{law.name}: {law.says}" for law in LAWS) + ".",
        f"{passed} of {len(report.outcomes)} passed: {verdict}.",
    ]
    data = {
        "world": report.world,
        "device": report.device,
        "backend": report.backend,
        "between_nodes": report.hierarchy or "tested",
        "routes": report.routes,
        "outcomes": report.outcomes,
        "failed": len(report.failed),
    }
    return Answer(data, shown, code=int(bool(report.failed)))
