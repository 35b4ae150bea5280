"""Runs the script in which a rank fails, and waits until every process of it is gone."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.failure import faulty

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(faulty.__file__))
LIMIT_S = 90.0
"""Until a launch is killed with all its processes."""

_MARK = "COMMOPT_TEST_LAUNCH"
_MESSAGE = re.compile(r"^commopt: (rank \d+, .*all ranks end\.(?:\nThe main thread of.*\n(?:  .*\n)*)?)", re.MULTILINE)


@dataclass
class Outcome:
    """What a launch left.

    Args:
        seconds: From the fault until its last process was gone; from the start where there was none.
        code: Exit code of the launched process.
        ends: By rank, type and text of the exception that its run ended with.
        output: All that was printed.
        left: Processes that had to be killed.
        folder: Where ranks left their files.
    """

    seconds: float
    code: int
    ends: dict[int, tuple[str, str]]
    output: str
    left: list[int]
    folder: Path

    @property
    def messages(self) -> set[str]:
        """Texts of all that say that another rank failed."""
        return {text for kind, text in self.ends.values() if kind == "RankFailure"}

    @property
    def said(self) -> list[str]:
        """The messages about a failure that were printed, with the stack where there is one."""
        return [match.strip() for match in _MESSAGE.findall(self.output)]


class Launch:
    """A launch under way.

    Args:
        folder: For what it leaves; it is made.
        launch: See `faulty.Plan`.
        fault: Likewise.
        options: Likewise.
    """

    def __init__(self, folder: Path, launch: str, fault: str, **options: object) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._mark = uuid.uuid4().hex
        words = [SCRIPT, str(folder), launch, fault, *(f"{name}={value}" for name, value in options.items())]
        if launch == "torchrun":
            ranks = str(options.get("ranks", faulty.Plan.ranks))
            words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *words]
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", _MARK: self._mark}
        self._started = time.time()
        with open(folder / "output", "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, *words],
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def pids(self) -> list[int]:
        """All processes of this launch that have not ended, wherever they are in the tree."""
        found = []
        mark = f"{_MARK}={self._mark}".encode()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                state = (path / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if state not in "ZX" and mark in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
            except OSError:
                continue
        return found

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for something to happen in it."""
        deadline = self._started + LIMIT_S
        while not condition():
            assert time.time() < deadline, self.output()
            time.sleep(0.05)

    def pid(self, rank: int) -> int:
        """Process id of a rank, once it trains."""
        file = self.folder / f"pid.{rank}"
        self.wait_for(lambda: file.exists() and bool(file.read_text()))
        return int(file.read_text())

    def output(self) -> str:
        """What was printed so far."""
        return (self.folder / "output").read_text(errors="replace")

    def outcome(self) -> Outcome:
        """Wait for the end."""
        deadline = self._started + LIMIT_S
        while self._process.poll() is None and time.time() < deadline:
            time.sleep(0.05)
        while (left := self.pids()) and time.time() < deadline:
            time.sleep(0.1)
        gone = time.time()
        self.kill()
        fault = self.folder / "fault"
        since = float(fault.read_text()) if fault.exists() else self._started
        ends = {int(path.name.split(".")[1]): path for path in self.folder.glob("end.*.json")}
        return Outcome(
            gone - since,
            self._process.returncode,
            {rank: tuple(json.loads(path.read_text())) for rank, path in sorted(ends.items())},
            self.output(),
            left,
            self.folder,
        )

    def kill(self) -> None:
        """End what is left of it."""
        while left := self.pids():
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.05)
        self._process.wait()


def last_checkpoint_loads(folder: Path) -> bool:
    """Whether there is a checkpoint, and the newest one is whole."""
    files = [path for path in folder.glob("*/*.ckpt") if path.parent.name in ("kept", "emergency")]
    if not files:
        return False
    newest = max(files, key=lambda path: path.stat().st_mtime)
    return bool(torch.load(newest, weights_only=True)["state_dict"])
