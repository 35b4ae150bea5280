"""One rank of a budget: the CPU time of a step, by thread, and by phase of the thread that exchanges."""

import time
from collections.abc import Callable

import torch.distributed as dist
from typing_extensions import override

from benchmarks.links.modes import MODES, Compressed, Mode
from benchmarks.links.rank import begin, leave, machine
from benchmarks.links.record import Run, Series
from benchmarks.links.workload import batch
from lightning_commopt.measure import CpuClock

PHASES = ("encode", "blocked", "decode")


class ThreadClock(CpuClock):
    """CPU time of the calling thread."""

    @override
    def mark(self) -> float:
        return time.thread_time()


def phases_ms(mode: Mode) -> dict[str, float]:
    """Sums so far of the phases that the exchange records, in CPU time."""
    if not isinstance(mode, Compressed):
        return {}
    mode.path.recorder.settle()
    return {phase: ms for phase, ms in mode.path.recorder.totals_ms.items() if phase in PHASES}


def measured(mode: Mode, first: int, steps: int, rank: int) -> dict[str, float]:
    """Return the CPU ms a step of this process: all, the main thread, the exchanging thread, and its phases."""
    clocks: dict[str, Callable[[], float]] = {
        "process": time.process_time,
        "main": time.thread_time,
        "exchange": lambda: mode.codec_s,
    }
    sums, phases = dict.fromkeys((*clocks, "wall"), 0.0), phases_ms(mode)
    for step in range(first, first + steps):
        tokens, targets = batch(step, rank)
        dist.barrier()
        before, wall = {name: clock() for name, clock in clocks.items()}, time.perf_counter()
        mode.backward(mode.forward(tokens, targets))
        mode.step()
        sums["wall"] += time.perf_counter() - wall
        for name, clock in clocks.items():
            sums[name] += clock() - before[name]
    found = {name: 1e3 * total / steps for name, total in sums.items()}
    return found | {phase: (ms - phases[phase]) / steps for phase, ms in phases_ms(mode).items()}


def main() -> None:
    """Measure, and write the mean over ranks on rank 0."""
    task = begin()
    dist.init_process_group("gloo", timeout=task.timeout)
    rank = dist.get_rank()
    run = Run(task.ranks, task.rate, task.warm_up, machine=machine())
    for name in task.modes:
        mode = MODES[name]()
        if isinstance(mode, Compressed):
            mode.path.recorder.clock = ThreadClock()
        measured(mode, 0, task.warm_up, rank)
        mine = measured(mode, task.warm_up, task.steps, rank)
        everyone: list[dict[str, float]] = [{}] * task.ranks
        dist.all_gather_object(everyone, mine)
        mean = {key: sum(one[key] for one in everyone) / task.ranks for key in mine}
        run.series[name] = Series(bucket_numels=mode.bucket_numels, spans_ms=mean)
        mode.close()
    if rank == 0:
        run.write(task.out_path)
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
