"""What `commopt plan` would have said of the measured steps of ``benchmarks.links``.

    python -m benchmarks.planner          # a table in Markdown; nothing is run

The planner is given what a person knows beforehand: parameters, ranks, the rate of the links as ``tc`` was told, their
latency, how long forward and backward take in one process without exchange (``nosync``), and how fast this machine
copies memory (``benchmarks.kernels``). What codecs and the network's own work cost a processor is assumed, not probed.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.links.record import Run, read_runs
from lightning_commopt.compression import METHODS, method_named
from lightning_commopt.demo.network import bits_per_second
from lightning_commopt.planning import Cluster, Layout, Model, Training
from lightning_commopt.planning.layout_step import Work, simulate_layout

__all__ = ["RESULTS", "Row", "rows", "table"]

RESULTS = Path(__file__).parent / "results"
_RATES = ("100mbit", "1gbit", "10gbit")
_MEMORY_RATE = 7e10  # 33.5 MB read and written in 0.472 ms, benchmarks/README.md, "Kernels"
_SAMPLES, _LAYERS, _WIDTH, _TOKENS = 2, 4, 256, 64


@dataclass(frozen=True)
class Row:
    """One method of one run.

    Args:
        run: Ranks and rate in words.
        method: Its word.
        planned_ms: Of a step.
        measured_ms: Of a step, the median.
        planned_gain: Dense step over this one.
        measured_gain: The same.

    """

    run: str
    method: str
    planned_ms: float
    measured_ms: float
    planned_gain: float
    measured_gain: float

    @property
    def error(self) -> float:
        """Planned over measured, less one."""
        return self.planned_ms / self.measured_ms - 1


def rows(run: Run) -> Iterator[Row]:
    """Yield planned and measured of each method of a run.

    Args:
        run: A result with the mode ``nosync``.

    """
    floor = run.series["nosync"]
    cluster = Cluster(
        devices=run.ranks,
        per_node=1,
        memory=4e9,
        flops_per_second=1e11,
        memory_rate=_MEMORY_RATE,
        inter_rate=bits_per_second(run.rate) / 8,
        inter_latency_ms=run.latency_ms,
        kind="cpu",
    )
    model = Model(run.parameters, _LAYERS, _WIDTH, 4, _TOKENS)
    compute_ms = median(floor.step_ms) - median(floor.optimizer_ms)
    training = Training(_SAMPLES * run.ranks, "32-true", compute_ms=compute_ms, compute_samples=_SAMPLES)
    work = Work(model, training, cluster, Layout("data", run.ranks), _SAMPLES, 1)

    def planned_ms(word: str) -> float:
        step_ms = simulate_layout(work, method_named(word)).step_ms
        return step_ms - work.optimizer_ms + median(floor.optimizer_ms)

    dense_ms = planned_ms("none"), median(run.series["ddp"].step_ms)
    for word in METHODS:
        if word in run.series:
            planned, measured = planned_ms(word), median(run.series[word].step_ms)
            yield Row(run.title, word, planned, measured, dense_ms[0] / planned, dense_ms[1] / measured)


def table(found: list[Row]) -> Iterator[str]:
    """Yield the rows in Markdown, and what they come to."""
    yield "| network | method | planned, ms | measured, ms | error | planned gain | measured gain |"
    yield "|---|---|---|---|---|---|---|"
    for row in found:
        yield (
            f"| {row.run} | {row.method} | {row.planned_ms:.1f} | {row.measured_ms:.1f} | {row.error:+.0%} "
            f"| {row.planned_gain:.1f}x | {row.measured_gain:.1f}x |"
        )
    yield ""
    for rate in _RATES:
        errors = [abs(row.error) for row in found if row.run.endswith(f", {rate}")]
        if errors:
            yield f"Median error at {rate} {median(errors):.0%}, largest {max(errors):.0%}, over {len(errors)} rows."


def saved_runs(results: Path) -> list[Run]:
    """Return the runs on links of a known rate."""
    return [run for run in read_runs(results) if "nosync" in run.series and not run.lightning and run.rate in _RATES]


def main() -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with the results of benchmarks.links")
    args = parser.parse_args()
    print("\n".join(table([row for run in saved_runs(args.results) for row in rows(run)])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
