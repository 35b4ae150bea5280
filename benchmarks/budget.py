"""Where the CPU time of a step goes: computing, encoding, sending, decoding, Python, and the network's thread.

    python -m benchmarks.budget --rate 1gbit --modes nosync ddp int8

CPU time, unlike wall time, hardly depends on what else the machine does. The workload and the network are those of
`benchmarks.links`: Linux, root and iproute2 are needed.
"""

import argparse
import sys
from collections.abc import Iterator

from benchmarks.links.budget_worker import PHASES
from benchmarks.links.launch import LaunchError, launch, signals_raise
from benchmarks.links.modes import MODES
from benchmarks.links.rank import Task
from benchmarks.links.record import Run
from lightning_commopt.demo.network import Network, NetworkError

COLUMNS = ("main thread", "encode", "send, wait", "decode", "queue, Python", "network thread", "sum", "wall")


def table(run: Run) -> Iterator[str]:
    """Yield a line a mode, CPU ms a step and rank."""
    yield f"| mode | {' | '.join(COLUMNS)} |"
    yield "|---" * (len(COLUMNS) + 1) + "|"
    for mode, series in run.series.items():
        ms = series.spans_ms
        phases = [ms.get(phase, 0.0) for phase in PHASES]
        rest = ms["exchange"] - sum(phases)
        network = ms["process"] - ms["main"] - ms["exchange"]
        cells = [ms["main"], *phases, rest, network, ms["process"], ms["wall"]]
        yield f"| {mode} | {' | '.join(f'{cell:.1f}' for cell in cells)} |"


def main() -> int:
    """Measure and print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="of every link, as tc writes it; none: unshaped")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["nosync", "ddp", "int8"], metavar="MODE")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a launch is killed")
    args = parser.parse_args()
    task = Task(tuple(args.modes), args.steps, args.warm_up, args.ranks, args.rate)
    try:
        with signals_raise(), Network(args.ranks, args.rate) as network:
            run = launch(network, "benchmarks.links.budget_worker", task, args.limit)
    except (NetworkError, LaunchError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{run.title}, {args.steps} steps; CPU ms a step and rank")
    print("\n".join(table(run)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
