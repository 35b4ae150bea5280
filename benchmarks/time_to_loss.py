"""How long training takes to a loss on a slow link, in DDP and in every method.

    python -m benchmarks.time_to_loss                            # two ranks at 100mbit
    python -m benchmarks.time_to_loss --modes ddp int8 onebit
    python -m benchmarks.time_to_loss --report                   # tables of all results

Model, data, network and modes are those of ``benchmarks.links``, whose needs it shares. Modes train one after the other
from the same weights on the same batches, until the mean loss of five steps is at most 0.18 nats a word. The time is
the sum of the steps, each as long as on its slowest rank, from the first one on.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

from benchmarks.links.launch import LaunchError, launch, signals_raise
from benchmarks.links.modes import MODES
from benchmarks.links.rank import Task
from benchmarks.links.record import Run
from benchmarks.links.target_worker import SMOOTHED, TARGET, reached
from lightning_commopt.demo.network import Network, NetworkError

RESULTS = Path(__file__).parent / "results"
DEFAULT_MODES = ("ddp", "bf16", "int8", "int4", "onebit", "auto", "auto_onebit", "torch_powersgd4")


def rows(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a table in Markdown for each run."""
    for run in runs:
        yield f"### Loss {TARGET}, {run.title}"
        yield ""
        yield f"{run.machine.get('processor')}, load {run.machine.get('load')}, {run.machine.get('date')}."
        yield ""
        yield "| mode | seconds | steps | ms a step | bytes/parameter | loss there | replicas |"
        yield "|---|---|---|---|---|---|---|"
        for mode, series in run.series.items():
            seconds, steps = sum(series.step_ms) / 1e3, len(series.step_ms)
            time = f"{seconds:.1f}" if reached(series.losses) else f"not within {seconds:.1f}"
            sent = fmean(series.tx_bytes) / run.parameters
            equal = "equal" if series.replicas_equal else "differ"
            yield (
                f"| {mode} | {time} | {steps} | {1e3 * seconds / steps:.1f} | {sent:.3f} "
                f"| {fmean(series.losses[-SMOOTHED:]):.4f} | {equal} |"
            )
        yield ""


def plot(run: Run, path: Path) -> None:
    """Draw the loss over the time that was spent, where matplotlib is installed."""
    if find_spec("matplotlib") is None:
        print("No plot: `pip install lightning-commopt[report]` brings matplotlib.")
        return
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for mode, series in run.series.items():
        seconds = [ms / 1e3 for ms in itertools.accumulate(series.step_ms)]
        axes.plot(seconds, series.losses, label=mode, color="black" if mode == "ddp" else None)
    axes.axhline(TARGET, color="gray", linewidth=0.8)
    axes.set(xlabel="seconds of training", ylabel="loss, nats a word", xscale="log", yscale="log", title=run.title)
    axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> int:
    """Measure or report; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="100mbit", help="of every link, as tc writes it; none: unshaped")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(DEFAULT_MODES))
    parser.add_argument("--steps", type=int, default=400, help="after which a mode is given up")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--limit", type=float, default=3600, help="seconds after which the run is killed")
    parser.add_argument("--report", action="store_true", help="print tables of all results, run nothing")
    args = parser.parse_args()
    if args.report:
        print("\n".join(rows([Run.read(path) for path in sorted(args.results.glob("time-to-loss-*.json"))])))
        return 0
    try:
        with signals_raise(), Network(args.ranks, args.rate) as network:
            task = Task(tuple(args.modes), args.steps, 0, args.ranks, args.rate)
            run = launch(network, "benchmarks.links.target_worker", task, args.limit)
    except (NetworkError, LaunchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    path = run.write_new(args.results, f"time-to-loss-{args.ranks}x{args.rate}")
    plot(run, path.with_suffix(".png"))
    print("\n".join(rows([run])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
