"""Time until all processes are gone when a rank fails, by fault and launcher.

`python -m benchmarks.failures [WORD ...]` runs the launches whose name holds one of the words, all without, and leaves
out those that have a result; `--report` prints the table.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.failure.launch import Launch, Outcome, last_checkpoint_loads

RESULTS = Path(__file__).parent / "results" / "failures.jsonl"
LAUNCHERS = ("popen", "spawn", "torchrun")

FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "SIGKILL": ("kill", {}),
    "SIGKILL, rank 0": ("kill", {"rank": 0}),
    "SIGKILL, data loader with workers": ("kill", {"workers": 1}),
    "SIGKILL, compression none": ("kill", {"compression": "none"}),
    "SIGSTOP": ("stop", {}),
    "SIGSTOP, rank 0": ("stop", {"rank": 0}),
    "SIGTERM": ("term", {}),
    "SIGTERM, rank 0": ("term", {"rank": 0}),
    "os._exit": ("exit", {}),
    "raise": ("raise", {}),
    "raise, rank 0": ("raise", {"rank": 0}),
    "raise, OnExceptionCheckpoint": ("raise", {"callback": "on_exception"}),
    "raise, rank 0, OnExceptionCheckpoint": ("raise", {"callback": "on_exception", "rank": 0}),
    "raise, save_on_exception": ("raise", {"callback": "save_on_exception"}),
    "SIGKILL, OnExceptionCheckpoint": ("kill", {"callback": "on_exception"}),
    "KeyboardInterrupt": ("interrupt", {}),
    "sys.exit": ("sysexit", {}),
    "returns None": ("none", {}),
    "constant loss": ("constant", {}),
    "constant loss that requires grad": ("leaf", {}),
    "the same, compression none": ("leaf", {"compression": "none"}),
    "loss without parameters, compression none": ("unused", {"compression": "none"}),
    "endless loop, stall_timeout=5": ("loop", {"stall": 5}),
    "endless loop, rank 0, stall_timeout=5": ("loop", {"stall": 5, "rank": 0}),
    "endless loop after the step, stall_timeout=5": ("loop-data", {"stall": 5}),
    "interpreter held, stall_timeout=5": ("gil", {"stall": 5}),
}
OVER_NODES = {
    "SIGKILL": ("kill", {}),
    "SIGSTOP": ("stop", {}),
    "raise": ("raise", {}),
    "endless loop, stall_timeout=5": ("loop", {"stall": 5}),
    "interpreter held, stall_timeout=5": ("gil", {"stall": 5}),
    "SIGKILL, rank 0": ("kill", {"rank": 0}),
}


def launches() -> dict[tuple[str, str], tuple[str, str, dict[str, Any]]]:
    """Launcher, fault and options by column and row."""
    on_a_node = {
        (launcher, row): (launcher, fault, options)
        for row, (fault, options) in FAULTS.items()
        for launcher in LAUNCHERS
    }
    return on_a_node | {
        ("torchrun", f"{row}, as 3 nodes"): ("torchrun", fault, options | {"nodes": 3})
        for row, (fault, options) in OVER_NODES.items()
    }


def judged(outcome: Outcome, rank: int) -> dict[str, Any]:
    """What counts: one message on every survivor (each node prints it), no process left, a checkpoint that loads."""
    survivors = {r: kind for r, (kind, _) in outcome.ends.items() if r != rank}
    alike = len(set(outcome.said)) == 1 and outcome.messages <= {outcome.said[0]}
    ended = outcome.code != 0 or set(survivors.values()) == {"SIGTERMException"}  # which Lightning exits with 0 on
    return {
        "seconds": round(outcome.seconds, 1),
        "code": outcome.code,
        "message": outcome.said[0].splitlines()[0] if outcome.said else "",
        "ends": survivors,
        "ok": alike and not outcome.left and ended and last_checkpoint_loads(outcome.folder),
    }


def results() -> dict[tuple[str, str], dict[str, Any]]:
    """Read what was written down."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {(r["launcher"], r["fault"]): r for r in map(json.loads, lines)}


def run(words: list[str], seconds: float) -> None:
    """Run launches one after another, and write down each; begin none after some seconds."""
    started = time.monotonic()
    for (column, row), (launcher, fault, options) in launches().items():
        if time.monotonic() - started > seconds:
            return
        if (column, row) in results() or words and not any(word in f"{column}: {row}" for word in words):
            continue
        with tempfile.TemporaryDirectory() as folder:
            launch = Launch(Path(folder) / "run", launcher, fault, **options)
            result = {"launcher": column, "fault": row} | judged(launch.outcome(), options.get("rank", 1))
        print(json.dumps(result), flush=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(result) + "\n")


def report() -> None:
    """Print a Markdown table of the latest results."""
    known = results()
    print("| fault | " + " | ".join(LAUNCHERS) + " |\n|---|" + "---|" * len(LAUNCHERS))
    for fault in dict.fromkeys(fault for _, fault in launches()):
        found = [known.get((launcher, fault)) for launcher in LAUNCHERS]
        if not any(found):
            continue
        cells = ["" if r is None else f"{r['seconds']:.1f}{'' if r['ok'] else ' (!)'}" for r in found]
        print(f"| {fault} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    arguments = parser.parse_args()
    if arguments.report:
        report()
    else:
        run(arguments.words, arguments.seconds)
