"""How long a step takes on slow links, for DDP, torch's hooks and every method, side by side.

    python -m benchmarks.links --ranks 2 --rate 100mbit              # every mode, interleaved in one launch
    python -m benchmarks.links --rate 1gbit --modes nosync ddp int8  # some of them
    python -m benchmarks.links --lightning                           # strategies in Lightning's own loop
    python -m benchmarks.links --suite                               # all networks of the table
    python -m benchmarks.links --smoke                               # does it work here? half a minute
    python -m benchmarks.links --report                              # tables and plot of all results

Needs Linux, root and iproute2: every rank runs in a network namespace of its own, joined by a bridge, with ``tc tbf``
on both ends of every link. All is taken down in the end, also after Ctrl-C, SIGTERM or an error.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.links.launch import LaunchError, launch, signals_raise
from benchmarks.links.lightning_worker import STRATEGIES
from benchmarks.links.modes import MODES
from benchmarks.links.rank import Task
from benchmarks.links.record import Run, read_runs
from benchmarks.links.report import markdown, plot
from lightning_commopt.demo.network import Network, NetworkError, bits_per_second

RESULTS = Path(__file__).parents[1] / "results"
SUITE = ((2, "100mbit"), (2, "1gbit"), (4, "100mbit"), (4, "1gbit"), (2, "none"))
LIGHTNING_MODES = ("ddp", "ddp_cap1", "none", "int8", "int4", "onebit", "auto")


def measure(task: Task, lightning: bool, limit_s: float) -> Run:
    """Run all modes of a task on a network of its own."""
    with Network(task.ranks, task.rate) as network:
        if not lightning:
            return launch(network, "benchmarks.links.worker", task, limit_s)
        runs = []
        for mode in task.modes:
            one = Task((mode,), task.steps, task.warm_up, task.ranks, task.rate)
            runs.append(launch(network, "benchmarks.links.lightning_worker", one, limit_s))
    for run in runs[1:]:
        runs[0].series |= run.series
    return runs[0]


def save(run: Run, folder: Path) -> None:
    """Write a run and its plot."""
    path = run.write_new(folder, f"links-{run.ranks}x{run.rate}{'-lightning' if run.lightning else ''}")
    plot([run], path.with_suffix(".png"))
    print(f"Written: {path}")


def arguments() -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="100mbit", help="of every link, as tc writes it; none: unshaped")
    parser.add_argument("--modes", nargs="+", help=f"some of {', '.join(MODES)}")
    parser.add_argument("--steps", type=int, default=60, help="recorded steps of each mode")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before them")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for JSON and plots")
    parser.add_argument("--limit", type=float, default=3600, help="seconds after which a launch is killed")
    parser.add_argument("--lightning", action="store_true", help="measure strategies in Lightning's loop")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--suite", action="store_true", help="measure on all networks of the table")
    what.add_argument("--smoke", action="store_true", help="a few steps of ddp and int8 at 1gbit")
    what.add_argument("--report", action="store_true", help="print tables of all results and draw them, run nothing")
    args = parser.parse_args()
    if args.smoke:
        args.ranks, args.rate, args.steps, args.warm_up = 2, "1gbit", 3, 2
        args.modes = args.modes or ["ddp", "int8"]
    known = STRATEGIES if args.lightning else MODES
    args.modes = args.modes or list(LIGHTNING_MODES if args.lightning else MODES)
    if unknown := [mode for mode in args.modes if mode not in known]:
        parser.error(f"`{unknown[0]}` is not a mode here: choose from {', '.join(known)}.")
    for value, least, option in ((args.ranks, 2, "ranks"), (args.steps, 1, "steps"), (args.warm_up, 2, "warm-up")):
        if value < least:
            parser.error(f"`--{option}` must be >= {least}.")
    try:
        bits_per_second(args.rate)
    except ValueError as error:
        parser.error(str(error))
    return args


def main() -> int:
    """Measure or report; return the exit status."""
    args = arguments()
    if args.report:
        runs = read_runs(args.results)
        print("\n".join(markdown(runs)))
        plot(runs, args.results / "links.png")
        return 0
    try:
        with signals_raise():
            for ranks, rate in SUITE if args.suite else ((args.ranks, args.rate),):
                task = Task(tuple(args.modes), args.steps, args.warm_up, ranks, rate)
                run = measure(task, args.lightning, args.limit)
                save(run, args.results)
                print("\n".join(markdown([run])), flush=True)
    except (NetworkError, LaunchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
