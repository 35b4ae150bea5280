"""Runs the script in which a rank fails, and waits until every process of it is gone."""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.failure import faulty
from tests.launch.job import Job

SCRIPT = str(Path(faulty.__file__))
LIMIT_S = 90.0
"""Until a launch is killed with all its processes."""

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


class Launch(Job):
    """A launch under way.

    Args:
        folder: For what it leaves; it is made.
        launch: See `faulty.Plan`.
        fault: Likewise.
        options: Likewise.
    """

    def __init__(self, folder: Path, launch: str, fault: str, **options: object) -> None:
        folder.mkdir(parents=True)
        words = [SCRIPT, str(folder), launch, fault, *(f"{name}={value}" for name, value in options.items())]
        ranks = str(options.get("ranks", faulty.Plan.ranks))
        if launch == "torchrun":
            words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *words]
        launcher = ["mpirun", "-n", ranks] if launch == "mpirun" else []
        super().__init__([*launcher, sys.executable, *words], folder, LIMIT_S)

    def pid(self, rank: int) -> int:
        """Process id of a rank, once it trains."""
        file = self.folder / f"pid.{rank}"
        self.wait_for(lambda: file.exists() and bool(file.read_text()))
        return int(file.read_text())

    def outcome(self) -> Outcome:
        """Wait for the end."""
        code, left = self.finish()
        fault = self.folder / "fault"
        since = float(fault.read_text()) if fault.exists() else self.started
        ends = {int(path.name.split(".")[1]): path for path in self.folder.glob("end.*.json")}
        return Outcome(
            self.ended - since,
            code,
            {rank: tuple(json.loads(path.read_text())) for rank, path in sorted(ends.items())},
            self.output(),
            left,
            self.folder,
        )


def last_checkpoint_loads(folder: Path) -> bool:
    """Whether there is a checkpoint, and the newest one is whole."""
    files = [path for path in folder.glob("*/*.ckpt") if path.parent.name in ("kept", "emergency")]
    if not files:
        return False
    newest = max(files, key=lambda path: path.stat().st_mtime)
    return bool(torch.load(newest, weights_only=True)["state_dict"])
