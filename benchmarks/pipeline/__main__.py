"""The bubble of every schedule, measured against theory and the simulator, and the memory of a rank.

`python -m benchmarks.pipeline` takes about three minutes; `--report` prints the tables of the last results.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.pipeline.memory import train
from benchmarks.pipeline.sleeping import FORWARD, Timing, time_schedules
from lightning_commopt.pipeline import ideal_bubble, peak_activations, schedule_named
from lightning_commopt.pipeline.measured import MeasuredStep
from tests.pool import WorkerPool

RESULTS = Path(__file__).parents[1] / "results" / "pipeline.json"
RANKS = (2, 4)
MICROBATCHES = (4, 8, 16)
STEPS = 5
FITS = ((1, 8, "none"), (2, 8, "gpipe"), (2, 8, "1f1b"), (4, 16, "gpipe"), (4, 16, "1f1b"), (4, 16, "zbv"))
"""Of which memory is measured: ranks, microbatches, schedule."""


@dataclass(frozen=True)
class Row:
    """A schedule on some ranks.

    Args:
        ranks: Processes.
        microbatches: In a step.
        schedule: Its name.
        ideal: The bubble of equal stages.
        simulated: With the measured costs of actions, and no other delay.
        measured: Median over steps.
        worst_rank: The same, of the rank that waits most.
        step_ms: Median.
        held: Microbatches whose activations a rank holds at most, in shares of one rank's stages.

    """

    ranks: int
    microbatches: int
    schedule: str
    ideal: float
    simulated: float
    measured: float
    worst_rank: float
    step_ms: float
    held: float


def row_of(ranks: int, timings: Sequence[Timing]) -> Row:
    """Make a row of what each rank timed."""
    name, microbatches, first = timings[0]
    schedule = schedule_named(name, ranks, microbatches)
    per_rank = [steps for _, _, steps in timings]
    steps = [
        MeasuredStep(tuple(rank[i][0] for rank in per_rank), max(rank[i][1] for rank in per_rank))
        for i in range(len(first))
    ]
    return Row(
        ranks,
        microbatches,
        name,
        ideal_bubble(name, ranks, microbatches),
        median(step.simulated(schedule).bubble for step in steps),
        median(step.bubble for step in steps),
        median(max(step.bubbles) for step in steps),
        1e3 * median(step.step for step in steps),
        max(peak_activations(schedule)) * ranks / schedule.stages,
    )


@dataclass(frozen=True)
class MemoryRow:
    """A fit on some ranks; MB of the rank that held most."""

    ranks: int
    microbatches: int
    schedule: str
    tensors: float
    peak: float


def measure(pool: WorkerPool) -> Iterator[Row]:
    """Time all schedules."""
    for ranks in RANKS:
        by_rank = pool.run(time_schedules, ranks, MICROBATCHES, STEPS, timeout=300)
        yield from (row_of(ranks, timings) for timings in zip(*by_rank, strict=True))


def measure_memory(pool: WorkerPool) -> Iterator[MemoryRow]:
    """Fit a model on one process, and on several."""
    for ranks, microbatches, schedule in FITS:
        held = pool.run(train, ranks, ranks, microbatches, schedule, timeout=120)
        peak = max(rank.peak for rank in held)
        yield MemoryRow(ranks, microbatches, schedule, max(rank.tensors for rank in held), peak)


def memory_table(rows: Sequence[MemoryRow]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield "| ranks | microbatches | schedule | tensors, MB | peak growth, MB |"
    yield "|---|---|---|---|---|"
    for row in rows:
        yield f"| {row.ranks} | {row.microbatches} | {row.schedule} | {row.tensors:.0f} | {row.peak:.0f} |"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield "| ranks | microbatches | schedule | ideal | simulated | measured | worst rank | ms a step | held |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in sorted(rows, key=lambda row: (row.ranks, row.microbatches)):
        bubbles = " | ".join(f"{x:.3f}" for x in (row.ideal, row.simulated, row.measured, row.worst_rank))
        yield (
            f"| {row.ranks} | {row.microbatches} | {row.schedule} | {bubbles} | {row.step_ms:.0f} | {row.held:.1f} |"
        )


def main() -> None:
    """Measure, or print the last results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__)
    parser.add_argument("--report", action="store_true", help="print the last results")
    if not parser.parse_args().report:
        load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
        machine = {"cores": os.cpu_count(), "load": load, "date": time.strftime("%Y-%m-%d %H:%M %Z")}
        pool = WorkerPool(max(RANKS))
        try:
            rows = [asdict(row) for row in measure(pool)]
            memory = [asdict(row) for row in measure_memory(pool)]
        finally:
            pool.close()
        settings = {"machine": machine, "forward": FORWARD, "steps": STEPS}
        RESULTS.write_text(json.dumps({**settings, "rows": rows, "memory": memory}, indent=1))
    results = json.loads(RESULTS.read_text())
    print(results["machine"])
    print("\n".join(table([Row(**row) for row in results["rows"]])))
    print("\n".join(memory_table([MemoryRow(**row) for row in results["memory"]])))


if __name__ == "__main__":
    main()
