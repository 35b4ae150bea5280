"""Train for minutes while things go wrong, and count what became of it.

    python -m benchmarks.soak --minutes 10 --seed 1

One training after another is carried over several launches. Each launch has a random launcher, world size and method
and suffers a random fault at a random moment on a random rank; the next one resumes from the last checkpoint, mostly
with another world size. Counted are faults injected, launches that ended cleanly (all processes gone, in time, with a
message that names the rank), launches that survived, and what must be 0: launches that hung (or left a process behind),
checkpoints lost, silent divergences (compared each epoch), and messages missing.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.soak_job import DIVERGED, Attempt

ENDS = ("kill", "stop", "exit", "raise", "none_loss", "cut")
SURVIVED = ("inf", "uneven", "none")
METHODS = ("none", "bf16", "fp16", "int8", "int4", "onebit", "topk", "powersgd")
SECONDS_TO_END = {"stop": 45.0}  # of torchrun's agent, which waits 30 s for whom it has sent SIGTERM
SECONDS = 30.0
STUCK = 120.0


@dataclass
class Tally:
    """What happened.

    Args:
        launches: By fault.
        outcomes: By fault: counts by outcome.
        seconds: By fault: from the fault until the last process was gone.
        problems: Descriptions of everything that must not happen.

    """

    launches: Counter[str] = field(default_factory=Counter)
    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    problems: list[str] = field(default_factory=list)


def members(mark: str) -> list[int]:
    """Return the living processes that were started with a mark in their environment, whatever their session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if state not in "ZX" and f"SOAK={mark}\0".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def command(attempt: Attempt, file: Path) -> list[str]:
    """Return how an attempt is started."""
    if attempt.launcher == "torchrun":
        run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={attempt.ranks}"]
        return [sys.executable, *run, "-m", "benchmarks.soak_job", str(file)]
    return [sys.executable, "-m", "benchmarks.soak_job", str(file)]


def launch(attempt: Attempt, tally: Tally) -> None:
    """Run one attempt to its end and judge it."""
    folder = Path(attempt.folder)
    for name in ("fault", "done"):
        (folder / name).unlink(missing_ok=True)
    file, output = folder / "attempt.json", folder / "output"
    file.write_text(json.dumps(asdict(attempt)))
    before, mark = checkpoint_step(folder), uuid.uuid4().hex
    with output.open("w") as log:
        process = subprocess.Popen(
            command(attempt, file),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1", "SOAK": mark},
        )
        started, hung = time.time(), False
        while process.poll() is None or members(mark):
            time.sleep(0.1)
            fault = folder / "fault"
            since = time.time() - (float(fault.read_text() or "inf") if fault.exists() else started)
            ends = fault.exists() and attempt.fault in ENDS
            if since > (SECONDS_TO_END.get(attempt.fault, SECONDS) if ends else STUCK):
                hung = True
                for pid in members(mark):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
    judge(attempt, tally, output.read_text(errors="replace"), process.returncode, hung, before)


def judge(attempt: Attempt, tally: Tally, text: str, code: int, hung: bool, before: int) -> None:
    """Count an attempt that has ended."""
    folder, fault = Path(attempt.folder), attempt.fault
    struck = (folder / "fault").exists()
    kind = fault if struck or fault == "uneven" else "none"
    tally.launches[kind] += 1
    done = (folder / "done").exists()

    def problem(what: str) -> None:
        tally.problems.append(f"{what}: {attempt}")
        (folder / f"problem-{len(tally.problems)}").write_text(f"{what}\n{attempt}\n{text}")
        print(f"    {what}", flush=True)

    if struck and kind in ENDS:
        tally.seconds[kind].append(time.time() - float((folder / "fault").read_text()))
    if hung:
        tally.outcomes[kind]["hung"] += 1
        problem("hung")
    elif "DIVERGED" in text or code == DIVERGED:
        tally.outcomes[kind]["diverged"] += 1
        problem("diverged")
    elif kind in ENDS and not done:
        # where the others have already ended their run, the launcher alone speaks
        named = re.search(rf"(rank|process) {attempt.rank}\b", text, re.IGNORECASE) is not None
        tally.outcomes[kind]["ended cleanly" if named else "ended without its rank named"] += 1
        if not named:
            problem("rank not named")
    elif done and (kind in SURVIVED):
        tally.outcomes[kind]["survived"] += 1
    else:
        tally.outcomes[kind]["unexpected end"] += 1
        problem("unexpected end")
    after = checkpoint_step(folder)
    if after < before:
        tally.outcomes[kind]["checkpoint lost"] += 1
        problem(f"checkpoint lost: step {before} before, {after} after")


def checkpoint_step(folder: Path) -> int:
    """Return the step of the last checkpoint, 0 where there is none, -1 where it cannot be loaded."""
    last = folder / "last.ckpt"
    if not last.exists():
        return 0
    try:
        return int(torch.load(last, weights_only=True)["global_step"])
    except Exception as error:  # whatever it is, the checkpoint is lost
        print(f"    {last}: {error}", flush=True)
        return -1


def attempts(folder: Path, random: random.Random) -> Iterator[Attempt]:
    """Yield launches of one training: each goes on for one or two epochs, if nothing happens."""
    method, epochs = random.choice(METHODS), 0
    for _ in range(random.randint(2, 5)):
        epochs += random.randint(2, 3)
        ranks = random.randint(2, 3)
        launcher = random.choice(("popen", "torchrun", "fork", "fork", "spawn"))
        fault = random.choice((*ENDS, *SURVIVED))
        if fault == "inf" and method == "none":
            fault = "none"  # DDP's own reducer lets it through
        step = random.randint(1, 3) if fault == "cut" else random.randint(2, 20)
        yield Attempt(str(folder), launcher, ranks, method, epochs, fault, random.randrange(ranks), step)


def table(tally: Tally) -> Iterator[str]:
    """Yield the counts in Markdown, one line a fault."""
    columns = ("ended cleanly", "survived", "hung", "checkpoint lost", "diverged")
    yield f"| fault | launches | {' | '.join(columns)} | other | seconds until gone, median (largest) |"
    yield "|---" * (len(columns) + 4) + "|"
    for fault in (*ENDS, *SURVIVED):
        if launches := tally.launches[fault]:
            counts = tally.outcomes[fault]
            other = sum(n for outcome, n in counts.items() if outcome not in columns)
            times = sorted(tally.seconds[fault])
            gone = f"{times[len(times) // 2]:.1f} ({times[-1]:.1f})" if times else ""
            yield f"| {fault} | {launches} | {' | '.join(str(counts[c]) for c in columns)} | {other} | {gone} |"


def main() -> None:
    """Launch until the time is over, then print the table; the exit code tells whether anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for checkpoints and output; otherwise a temporary one")
    args = parser.parse_args()
    draw, tally, end = random.Random(args.seed), Tally(), time.time() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as temporary:
        root, trainings = args.keep or Path(temporary), 0
        while time.time() < end:
            trainings += 1
            folder = root / f"training-{trainings}"
            folder.mkdir(parents=True)
            for attempt in attempts(folder, draw):
                if time.time() > end:
                    break
                print(
                    f"{trainings}: {attempt.launcher} {attempt.ranks} x {attempt.method} to epoch {attempt.epochs}, "
                    f"{attempt.fault} on rank {attempt.rank} at {attempt.step}",
                    flush=True,
                )
                launch(attempt, tally)
    print(f"\n{trainings} trainings, {sum(tally.launches.values())} launches, seed {args.seed}\n")
    print("\n".join(table(tally)))
    print("\n".join(tally.problems))
    sys.exit(bool(tally.problems))


if __name__ == "__main__":
    main()
