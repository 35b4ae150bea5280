"""Real signals in real launches: one message on every survivor, no process left, and the last checkpoint loads."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.failure.launch import LIMIT_S, Launch, Outcome, last_checkpoint_loads

pytestmark = pytest.mark.runs("commopt", "failing together")

BOUND_S = 45.0
"""From the fault until the last process is gone; generous, since launches share the cores of the test machine."""

FAULTS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "popen-kill": ("popen", "kill", {"compression": "none"}, "in backward of step 5, ended without a word"),
    "popen-stop-rank-0": ("popen", "stop", {"rank": 0, "ranks": 2}, "in backward of step 5, was stopped (SIGSTOP"),
    "popen-raise": (
        "popen",
        "raise",
        {"callback": "on_exception", "ranks": 2},
        "in training_step of step 5, raised ValueError: ",
    ),
    "spawn-kill": ("spawn", "kill", {"ranks": 2}, "in backward of step 5, ended without a word"),
    "torchrun-stop": ("torchrun", "stop", {"ranks": 2}, "in backward of step 5, was stopped (SIGSTOP"),
    "mpirun-raise": ("mpirun", "raise", {"ranks": 2}, "in training_step of step 5, raised ValueError: "),
}
AT_ONCE = 3


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Outcome]]:
    """All launches, a few at a time, since each of them mostly waits."""
    folder = tmp_path_factory.mktemp("launches")
    found: dict[str, Outcome] = {}
    running: dict[str, Launch] = {}
    try:
        for name, (launcher, fault, options, _) in FAULTS.items():
            running[name] = Launch(folder / name, launcher, fault, **options)
            if len(running) == AT_ONCE:
                first = next(iter(running))
                found[first] = running[first].outcome()
                del running[first]
        found |= {name: launch.outcome() for name, launch in running.items()}
        running = {}
        yield found
    finally:
        for launch in running.values():
            launch.kill()


@pytest.mark.timeout(len(FAULTS) * LIMIT_S)
@pytest.mark.parametrize("name", FAULTS)
def test_all_end_with_one_message(outcomes: dict[str, Outcome], name: str) -> None:
    outcome, (_, fault, options, words) = outcomes[name], FAULTS[name]
    rank = options.get("rank", 1)
    print(f"{name}: {outcome.seconds:.1f} s")
    assert outcome.left == []
    assert outcome.seconds < BOUND_S
    assert outcome.code != 0
    survivors = {r: kind for r, (kind, _) in outcome.ends.items() if r != rank}
    assert survivors == {r: "RankFailure" for r in range(options.get("ranks", 3)) if r != rank}, outcome.output
    assert list(outcome.messages) == outcome.said, outcome.output
    assert outcome.said[0].startswith(f"rank {rank}, {words}")
    if fault == "raise":
        assert outcome.ends[rank] == ("ValueError", "planted: bad sample")
    assert last_checkpoint_loads(outcome.folder)
    assert options.get("callback") != "on_exception" or list((outcome.folder / "emergency").glob("*.ckpt"))


@pytest.mark.timeout(2 * LIMIT_S)
def test_stopping_and_continuing_the_whole_job_is_harmless(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "run", "popen", "nothing", ranks=2, steps=100, beat=0.1)
    try:
        for rank in range(2):
            launch.pid(rank)
        pids = launch.pids()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                os.kill(pid, number)
            time.sleep(2.5 if number == signal.SIGSTOP else 0)  # a stopped rank would be ended after one second
        outcome = launch.outcome()
    finally:
        launch.kill()
    assert outcome.code == 0, outcome.output
    assert outcome.ends[0] == outcome.ends[1]
    assert outcome.ends[0][1].startswith("100 ")
    assert outcome.said == []
