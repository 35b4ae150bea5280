"""One rank of a budget: the CPU time of a step, by thread, and by phase of the thread that exchanges."""

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from benchmarks.links.modes import MODES, Compressed, Mode
from benchmarks.links.rank import begin, leave, machine
from benchmarks.links.record import Run, Series
from benchmarks.links.workload import batch
from lightning_commopt.measure import CpuClock
from lightning_commopt.routes.transport import GlooTransport, Travelling

PHASES = ("encode", "blocked", "decode")


class ThreadClock(CpuClock):
    """CPU time of the calling thread."""

    @override
    def mark(self) -> float:
        return time.thread_time()


class Blocked:
    """CPU time in which messages are issued and waited for."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, and is counted."""

        def call(*args: Any) -> Any:
            start = time.thread_time()
            result = function(*args)
            self.seconds += time.thread_time() - start
            return result

        return call


BLOCKED = Blocked()


def phases_ms(mode: Mode) -> dict[str, float]:
    """Sums so far of the phases of the exchange, in CPU time."""
    if not isinstance(mode, Compressed):
        return {}
    mode.path.recorder.settle()
    totals_ms = mode.path.recorder.totals_ms
    return {"encode": totals_ms["encode"], "blocked": 1e3 * BLOCKED.seconds, "decode": totals_ms["decode"]}


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
    GlooTransport._exchange = BLOCKED.timed(GlooTransport._exchange)  # type: ignore[method-assign]
    Travelling.wait = BLOCKED.timed(Travelling.wait)  # type: ignore[method-assign]
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
