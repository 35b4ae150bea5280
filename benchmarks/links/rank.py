"""What every process of a run needs, whoever drives the loop."""

import ctypes
import hashlib
import json
import os
import platform
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

__all__ = ["Task", "begin", "digest", "leave", "machine", "sent_bytes"]

_COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Task:
    """What a process is to do; the launcher hands it over as the only argument, in JSON.

    Args:
        modes: Words of the modes, in the order in which they are made.
        steps: Steps recorded in each mode.
        warm_up: Steps before them.
        ranks: Processes.
        rate: Of every link.
        out: Where rank 0 writes the run; the launcher sets it.
        timeout_s: How long a rank waits for the others.

    """

    modes: tuple[str, ...]
    steps: int
    warm_up: int
    ranks: int
    rate: str
    out: str = ""
    timeout_s: float = 120.0

    @property
    def out_path(self) -> Path:
        """Where rank 0 writes the run."""
        return Path(self.out)

    @property
    def timeout(self) -> timedelta:
        """Timeout of the process groups."""
        return timedelta(seconds=self.timeout_s)


def begin() -> Task:
    """Return the task; from here on this process ends with the one that started it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ["LINKS_LAUNCHER"]):
        sys.exit("The launcher is gone.")
    torch.set_num_threads(1)
    values = json.loads(sys.argv[1])
    return Task(**values | {"modes": tuple(values["modes"])})


def leave() -> NoReturn:
    """End the process well, at once.

    Torch 2.13 can hang at the interpreter's end: DDP's reducer drops the last reference to a gloo group while it holds
    the interpreter's lock, and waits for the group's thread, which needs that lock to drop its last tensor.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def sent_bytes() -> int:
    """Bytes sent through this rank's interface so far."""
    return int(_COUNTER.read_text())


def digest(module: nn.Module) -> str:
    """Return a hash of every bit of the parameters."""
    hashed = hashlib.sha256()
    for parameter in module.parameters():
        hashed.update(parameter.detach().numpy().tobytes())
    return hashed.hexdigest()


def machine() -> dict[str, str]:
    """Describe this machine, and how busy it was when the run began."""
    processor = next((line for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "unknown")
    return {
        "processor": processor.split(":")[-1].strip(),
        "cores": str(os.cpu_count()),
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
