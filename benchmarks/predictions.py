"""Predicted against measured step times, for every row of the saved results of ``benchmarks.links``.

    python -m benchmarks.predictions          # a table in Markdown, and the median error

What goes in: the step without exchange (``nosync``: forward, backward, optimizer, when gradients are ready), the rate
of the links as ``tc`` was told and the latency that was measured, sizes of buckets, bytes that a method promises, what
a codec costs this machine in one process (:func:`one_rank_ms`), and what the network's own work costs its processors
(:func:`stolen_ns_per_byte`). No step that synchronises goes in. Costs are those of the machine on which this runs: run
it where the results come from, while nothing else does.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.links.modes import MODES, Mode
from benchmarks.links.record import Run, Series, read_runs
from benchmarks.links.workload import batch, initial_model
from lightning_commopt.compression import METHODS, Uncompressed
from lightning_commopt.demo.network import Network, bits_per_second
from lightning_commopt.tuning import Channel, CodecCost, ComputeProfile, Link, Plan, predict

RESULTS = Path(__file__).parent / "results"
_HEADERS = 1.043  # Ethernet, IP and TCP around 1,448 bytes, and acknowledgements
_REPEATS = 12
_SENT_BYTES, _SENT_S = 64_000_000, 2.0
_LIMIT_S = 120.0
_PORT = 29511


@dataclass(frozen=True)
class Row:
    """One mode of one run.

    Args:
        run: Ranks and rate in words.
        mode: Its word.
        predicted_ms: Of a step.
        measured_ms: Of a step, the median.

    """

    run: str
    mode: str
    predicted_ms: float
    measured_ms: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_ms / self.measured_ms - 1


@cache
def one_rank_ms(word: str) -> float:
    """Return by how much a step of one process takes longer in a mode than without it: codec, copies, threads."""

    def step_ms(mode: Mode) -> float:
        times = []
        for step in range(_REPEATS):
            loss = mode.forward(*batch(step, 0))
            start = time.perf_counter()
            mode.backward(loss)
            times.append((time.perf_counter() - start) * 1e3)
            mode.step()
        mode.close()
        return min(times[2:])

    return max(0.0, step_ms(MODES[word]()) - step_ms(MODES["nosync"]()))


@cache
def stolen_ns_per_byte(rate: str) -> float:
    """Return the CPU nanoseconds that a byte costs on both sides of a link of that rate, all in all.

    The machine's processors are watched, since much of the work is done in no process's name, while two namespaces send
    to each other; what they did before is taken off.
    """
    count = int(min(_SENT_BYTES, bits_per_second(rate) / 8 * _SENT_S))
    command = [sys.executable, "-m", "benchmarks.predictions", "--send", str(count)]
    with Network(2, rate) as network:
        others = _busy()
        common = {"MASTER_ADDR": network.address(0), "MASTER_PORT": str(_PORT), "WORLD_SIZE": "2"}
        environment = os.environ | common | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                network.inside(rank, command), env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
            )
            for rank in range(2)
        ]
        try:
            seconds, busy = map(float, ranks[0].communicate(timeout=_LIMIT_S)[0].split())
            ranks[1].communicate(timeout=_LIMIT_S)
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                    rank.wait()
    return max(0.0, busy - others * seconds) / len(ranks) / count * 1e9


def send(count: int) -> None:
    """Exchange so many bytes with the other rank, and print the seconds and the CPU seconds of the machine."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    piece = torch.zeros(1 << 20, dtype=torch.uint8)
    other, got = 1 - dist.get_rank(), torch.empty_like(piece)
    dist.barrier()
    start, busy = time.perf_counter(), _cpu_s()
    for _ in range(max(1, count // len(piece))):
        works = [dist.irecv(got, other), dist.isend(piece, other)]
        for work in works:
            assert work is not None
            work.wait()
    print(time.perf_counter() - start, _cpu_s() - busy, flush=True)
    dist.barrier()
    os._exit(0)


def _cpu_s() -> float:
    """Return the seconds that all processors were busy since the machine began."""
    words = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    user, nice, system, _, _, irq, softirq, _ = map(int, words)
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _busy() -> float:
    """Return the processors that are busy with other things."""
    before, start = _cpu_s(), time.perf_counter()
    time.sleep(1.0)
    return (_cpu_s() - before) / (time.perf_counter() - start)


def rows(run: Run, cost_ms: Callable[[str], float], stolen: float) -> Iterator[Row]:
    """Yield predicted and measured of each mode that exchanges something.

    Args:
        run: A result.
        cost_ms: By word of a mode, :func:`one_rank_ms`.
        stolen: :func:`stolen_ns_per_byte` of the run's rate.

    """
    floor, crowd = run.series["nosync"], max(1.0, run.ranks / float(run.machine.get("cores", run.ranks)))
    profile = ComputeProfile(
        median(floor.forward_ms), median(floor.backward_ms), median(floor.optimizer_ms), run.ready, contention=1.0
    )
    channel = Channel(bits_per_second(run.rate) / 8 / _HEADERS, run.latency_ms * crowd, stolen * crowd)
    link = Link(run.ranks, channel, channel)
    total = sum(p.numel() for p in initial_model().parameters())
    for word, series in run.series.items():
        if not series.bucket_numels or word.startswith("auto"):
            continue  # nothing is exchanged, or not the same thing all the time
        ours = word in METHODS and METHODS[word] is not Uncompressed
        plan = Plan(
            METHODS[word]() if ours else Uncompressed(),
            series.bucket_numels,
            CodecCost(handling_ns=cost_ms(word) * crowd * 1e6 / total),
            bytes_per_element=_one_way_bytes(word, series, run) / total,
            overlapped=ours,
        )
        yield Row(run.title, word, predict(profile, link, plan).step_ms, median(series.step_ms))


def _one_way_bytes(word: str, series: Series, run: Run) -> float:
    """Return the bytes of all encoded buckets, before anybody sends them."""
    hops = 2 * (run.ranks - 1) / run.ranks if run.ranks > 2 else run.ranks - 1
    if series.promised_bytes:
        return series.promised_bytes / hops
    shapes = [p.shape for p in initial_model().parameters()]
    if word == "torch_fp16":
        return 2.0 * sum(shape.numel() for shape in shapes)
    if word.startswith("torch_powersgd"):
        rank = int(word.removeprefix("torch_powersgd"))
        return 4.0 * sum(rank * sum(shape) if len(shape) == 2 else shape.numel() for shape in shapes)
    return 4.0 * sum(shape.numel() for shape in shapes)


def table(found: list[Row]) -> Iterator[str]:
    """Yield the rows in Markdown, and what they come to."""
    yield "| network | mode | predicted, ms | measured, ms | error |"
    yield "|---|---|---|---|---|"
    for row in found:
        yield f"| {row.run} | {row.mode} | {row.predicted_ms:.1f} | {row.measured_ms:.1f} | {row.error:+.0%} |"
    errors = [abs(row.error) for row in found]
    ours = [abs(row.error) for row in found if not row.mode.startswith("torch_")]
    yield ""
    yield f"Median error {median(errors):.1%} over {len(errors)} rows, {median(ours):.1%} without torch's hooks."


def main() -> int:
    """Predict; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with the results of benchmarks.links")
    parser.add_argument("--send", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.send is not None:
        send(args.send)
    runs = [run for run in read_runs(args.results) if "nosync" in run.series and not run.lightning]
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_PORT), "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo")
    found = [row for run in runs for row in rows(run, one_rank_ms, stolen_ns_per_byte(run.rate))]
    print("\n".join(table(found)), flush=True)
    os._exit(0)  # torch 2.13 can hang at the interpreter's end, see benchmarks.links.rank


if __name__ == "__main__":
    sys.exit(main())
