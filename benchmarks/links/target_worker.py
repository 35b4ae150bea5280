"""One rank of a run towards a loss: modes one after the other, each until it is there."""

import sys
from statistics import fmean

import torch
import torch.distributed as dist

from benchmarks.links.modes import MODES, Mode
from benchmarks.links.rank import Task, begin, digest, leave, machine
from benchmarks.links.record import Run, Series
from benchmarks.links.worker import take_step

__all__ = ["SMOOTHED", "TARGET", "reached"]

TARGET = 0.18
"""Nats a word."""
SMOOTHED = 5
"""Steps whose mean loss counts."""


def reached(losses: list[float]) -> bool:
    """Whether the last steps' mean loss is at the target."""
    return len(losses) >= SMOOTHED and fmean(losses[-SMOOTHED:]) <= TARGET


def train(mode: Mode, task: Task, rank: int) -> Series:
    """Train from the initial weights until the target, or the task's number of steps; the same on all ranks."""
    series = Series()
    for step in range(task.steps):
        taken = take_step(mode, step, rank)
        slowest, sums = torch.tensor(taken.total), torch.tensor([taken.loss, float(taken.sent)], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)  # between steps: not timed
        dist.all_reduce(sums)
        loss, sent = (sums / task.ranks).tolist()
        series.step_ms.append(slowest.item())
        series.losses.append(loss)
        series.tx_bytes.append(sent)
        if reached(series.losses):
            break
    return series


def main() -> None:
    """Train every mode, and write the run on rank 0."""
    task = begin()
    dist.init_process_group("gloo", timeout=task.timeout)
    rank = dist.get_rank()
    run = Run(task.ranks, task.rate, 0, machine=machine())
    for name in task.modes:
        mode = MODES[name]()
        run.parameters = sum(p.numel() for p in mode.module.parameters())
        series = run.series[name] = train(mode, task, rank)
        hashes: list[str | None] = [None] * task.ranks
        dist.all_gather_object(hashes, digest(mode.module))
        series.replicas_equal = len(set(hashes)) == 1
        mode.close()
        if rank == 0:
            seconds = sum(series.step_ms) / 1e3
            print(f"{name}: {len(series.losses)} steps, {seconds:.1f} s", file=sys.stderr, flush=True)
    if rank == 0:
        run.write(task.out_path)
    leave()


if __name__ == "__main__":
    main()
