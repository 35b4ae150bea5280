"""One rank of a run: all modes in one process, interleaved step by step."""

import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.links.modes import MODES, Compressed, Mode
from benchmarks.links.rank import Task, begin, digest, leave, machine, sent_bytes
from benchmarks.links.record import Run, Series
from benchmarks.links.workload import batch

_PINGS = 50
_BACKWARDS = 5


class Step(NamedTuple):
    """What one rank measured of one step: ms, bytes, nats."""

    forward: float
    backward: float
    optimizer: float
    codec: float
    sent: int
    loss: float

    @property
    def total(self) -> float:
        """Duration of the step."""
        return self.forward + self.backward + self.optimizer


def take_step(mode: Mode, step: int, rank: int) -> Step:
    """Train one step, begun by all ranks together; bytes count until all ranks are through."""
    tokens, targets = batch(step, rank)
    dist.barrier()
    sent, codec, start = sent_bytes(), mode.codec_s, time.perf_counter()
    loss = mode.forward(tokens, targets)
    forward = time.perf_counter()
    mode.backward(loss)
    backward = time.perf_counter()
    mode.step()
    end = time.perf_counter()
    codec = mode.codec_s - codec
    dist.barrier()  # what this rank sent last may still be on its way out
    return Step(
        forward=(forward - start) * 1e3,
        backward=(backward - forward) * 1e3,
        optimizer=(end - backward) * 1e3,
        codec=codec * 1e3,
        sent=sent_bytes() - sent,
        loss=float(loss.detach()),
    )


def merged(everyone: Sequence[Sequence[Step]]) -> Series:
    """Put the ranks' steps of one mode together."""
    series = Series()
    for steps in zip(*everyone, strict=True):
        slowest = max(steps, key=lambda step: step.total)
        series.step_ms.append(slowest.total)
        series.forward_ms.append(slowest.forward)
        series.backward_ms.append(slowest.backward)
        series.optimizer_ms.append(slowest.optimizer)
        series.codec_ms.append(slowest.codec)
        series.tx_bytes.append(sum(step.sent for step in steps) / len(steps))
        series.losses.append(sum(step.loss for step in steps) / len(steps))
    return series


def latency_ms() -> float:
    """Return half of the median time of an empty round trip between ranks 0 and 1; 0 on the others."""
    rank, box, times = dist.get_rank(), torch.zeros(1), []
    for _ in range(_PINGS if rank < 2 else 0):
        start = time.perf_counter()
        for sender in (0, 1):
            _ = dist.send(box, 1 - rank) if rank == sender else dist.recv(box, 1 - rank)
        times.append(time.perf_counter() - start)
    return median(times) / 2 * 1e3 if times else 0.0


def ready_ms(rank: int) -> list[tuple[int, float]]:
    """Return how many gradients are there how long after the beginning of backward, median of some backwards."""
    mode, runs = Mode(), []
    seen: list[tuple[int, float]] = []
    for parameter in mode.module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append((p.numel(), time.perf_counter())))
    for step in range(_BACKWARDS):
        loss = mode.forward(*batch(step, rank))
        seen.clear()
        dist.barrier()
        start = time.perf_counter()
        mode.backward(loss)
        runs.append([(numel, (moment - start) * 1e3) for numel, moment in seen])
    ready, there = [], 0
    for moments in zip(*runs[1:], strict=True):
        there += moments[0][0]
        ready.append((there, median(ms for _, ms in moments)))
    return ready


def spans_ms(mode: Mode) -> dict[str, float]:
    """Return the sums so far of the exchange's phases, where it records any."""
    if not isinstance(mode, Compressed):
        return {}
    mode.path.recorder.settle()
    return dict(mode.path.recorder.totals_ms)


def train(modes: dict[str, Mode], task: Task, rank: int) -> tuple[dict[str, list[Step]], dict[str, Series]]:
    """Take all steps of all modes, every step beginning with another mode.

    Returns:
        This rank's steps, and the sums over them that are not taken step by step, both by mode.

    """
    names = list(modes)
    steps: dict[str, list[Step]] = {name: [] for name in names}
    before: dict[str, tuple[dict[str, float], int]] = {}
    for step in range(task.warm_up + task.steps):
        if step == task.warm_up:
            before = {name: (spans_ms(mode), mode.payload_bytes) for name, mode in modes.items()}
        first = step % len(names)
        for name in names[first:] + names[:first]:
            taken = take_step(modes[name], step, rank)
            if step >= task.warm_up:
                steps[name].append(taken)
        if rank == 0 and (step + 1) % max(1, task.steps // 5) == 0:
            print(f"{step + 1} of {task.warm_up + task.steps} steps", file=sys.stderr, flush=True)
    sums = {}
    for name, mode in modes.items():
        spans, promised = before[name]
        sums[name] = Series(
            bucket_numels=mode.bucket_numels,
            hops=mode.hops,
            promised_bytes=(mode.payload_bytes - promised) / task.steps,
            spans_ms={phase: (ms - spans[phase]) / task.steps for phase, ms in spans_ms(mode).items()},
        )
    return steps, sums


def main() -> None:
    """Measure, and write the run on rank 0."""
    task = begin()
    dist.init_process_group("gloo", timeout=task.timeout)
    rank = dist.get_rank()
    run = Run(task.ranks, task.rate, task.warm_up, machine=machine(), latency_ms=latency_ms(), ready=ready_ms(rank))
    modes = {name: MODES[name]() for name in task.modes}
    run.parameters = sum(p.numel() for p in next(iter(modes.values())).module.parameters())
    steps, sums = train(modes, task, rank)
    mine = {name: (steps[name], digest(mode.module)) for name, mode in modes.items()}
    everyone: list[dict[str, tuple[list[Step], str]] | None] = [None] * task.ranks
    dist.all_gather_object(everyone, mine)
    all_ranks = [one for one in everyone if one is not None]
    for name in modes:
        series = run.series[name] = merged([one[name][0] for one in all_ranks])
        series.bucket_numels, series.hops = sums[name].bucket_numels, sums[name].hops
        series.promised_bytes, series.spans_ms = sums[name].promised_bytes, sums[name].spans_ms
        series.replicas_equal = len({one[name][1] for one in all_ranks}) == 1
    if rank == 0:
        run.write(task.out_path)
    for mode in modes.values():
        mode.close()
    leave()


if __name__ == "__main__":
    main()
