"""A command with all processes that come of it, so that none can stay behind."""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
_MARK = "COMMOPT_TEST_JOB"
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "SLURM_", "PMI_")


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Job:
    """Runs in a folder, and prints into the file `output` there.

    Args:
        command: Words of the command.
        folder: Where it runs; it exists.
        limit_s: Seconds until it is killed with all its processes.
        variables: Further environment variables.
        programs: Folders where programs are found first.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        limit_s: float,
        variables: Mapping[str, str] | None = None,
        programs: Sequence[Path] = (),
    ) -> None:
        self.folder = folder
        self.started = time.time()
        self.ended = 0.0
        self._deadline = self.started + limit_s
        self._mark = uuid.uuid4().hex
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_OF_LAUNCHERS)}
        folders = [*programs, Path(sys.executable).parent, environment.get("PATH", "")]
        environment |= {
            "PATH": os.pathsep.join(map(str, folders)),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "COMMOPT_KERNELS": "torch",  # the same bits, and imported in no time
            _MARK: self._mark,
        }
        self.variables = dict(variables or {})
        environment |= self.variables
        with open(folder / "output", "ab") as output:
            self._process = subprocess.Popen(
                command,
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def pids(self) -> list[int]:
        """All its processes that have not ended, wherever they are in the tree."""
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

    @property
    def over(self) -> bool:
        """Whether nothing of it runs any more, or its time is up."""
        return time.time() > self._deadline or (self._process.poll() is not None and not self.pids())

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for something to happen in it."""
        while not condition():
            assert time.time() < self._deadline, self.output()
            time.sleep(0.05)

    def output(self) -> str:
        """What was printed so far."""
        return (self.folder / "output").read_text(errors="replace")

    def finish(self) -> tuple[int, list[int]]:
        """Wait for the end of all its processes; exit code of the first, and those that had to be killed."""
        while not self.over:
            time.sleep(0.05)
        self.ended = time.time()
        left = self.pids()
        self.kill()
        return self._process.returncode, left

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
