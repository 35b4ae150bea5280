"""The worker's side: `python -m tests.pool.worker RANK FOLDER PARENT`.

The supervisor of a rank imports torch and Lightning once and then forks one child a run. So a run starts in
milliseconds and in a fresh process: no environment, random state, signal handler, thread or process group outlives it.
Each rank has its own supervisor, with a hash seed of its own as on a cluster: a collective order that follows the
iteration of a set differs between ranks here too.
"""

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import os
import pickle
import random
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities import registry

from tests.pool.protocol import Hello, RankError, Success, Task

_PRELOAD = (
    "torch._dynamo",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.nn.parallel",
    "lightning.pytorch.demos.boring_classes",
    "hypothesis",
    "psutil",
    "pytest",
    "lightning_commopt",
    "lightning_commopt.compression.kernels.numba.quantized",
    "lightning_commopt.compression.kernels.numba.signs",
    "lightning_commopt.compression.kernels.numba.largest",
    "lightning_commopt.compression.kernels.numba.packing",
)
_PR_SET_PDEATHSIG = 1
_OF_FORKS = ("GLIBC_TUNABLES", "PYTHONMALLOC")
"""What makes forks fast, and the start of anything else that a test may start slow."""
_STACKS_SIGNAL = signal.SIGUSR2


def supervise(rank: int, folder: Path, parent: int) -> None:
    """Keeps one child waiting for a task, as long as the test process lives."""
    _die_with(parent)
    for variable in _OF_FORKS:
        os.environ.pop(variable, None)
    _preload()
    previous = None
    while os.getppid() == parent:
        supervisor = os.getpid()
        child = os.fork()
        if child == 0:
            _serve(rank, folder, supervisor, previous)
        _, status = os.waitpid(child, 0)
        previous = os.waitstatus_to_exitcode(status)


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _preload() -> None:
    for module in _PRELOAD:
        with contextlib.suppress(Exception):  # the test that needs it reports it
            importlib.import_module(module)
    # Each Trainer asks for these, and metadata of all installed distributions is read for it: a fifth of a short fit.
    registry.entry_points = functools.cache(registry.entry_points)  # type: ignore[assignment]
    registry.entry_points(group="lightning.pytorch.callbacks_factory")
    gc.collect()
    gc.freeze()


def _serve(rank: int, folder: Path, supervisor: int, previous: int | None) -> NoReturn:
    """Runs one task in this process and ends it."""
    try:
        os.setsid()
        _die_with(supervisor)
        _redirect_output(folder / f"{os.getpid()}.log")
        with open(folder / f"{os.getpid()}.stacks", "w") as stacks, _connect(folder) as connection:
            faulthandler.enable()
            faulthandler.register(_STACKS_SIGNAL, stacks)
            connection.send_bytes(pickle.dumps(Hello(rank, os.getpid(), previous)))
            outcome = _execute(pickle.loads(connection.recv_bytes()))
            connection.send_bytes(outcome)
            connection.recv_bytes()  # stay until the pool ends this process: peers may still need its sockets
    except (EOFError, ConnectionError, FileNotFoundError):
        os._exit(0)  # the pool was closed
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _redirect_output(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _connect(folder: Path) -> Connection:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(folder / "pool.sock"))
        return Connection(client.detach())


def _execute(task: Task) -> bytes:
    """The pickled `Success` or `RankError` of the call."""
    try:
        _prepare(task)
        function, args, kwargs = pickle.loads(task.call)
        return pickle.dumps(Success(function(*args, **kwargs)))
    except BaseException as error:
        return pickle.dumps(RankError.of(error))


def _prepare(task: Task) -> None:
    sys.path[:] = task.sys_path
    os.environ.update(task.environment)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    if task.backend is not None:
        if "nccl" in task.backend:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        dist.init_process_group(task.backend)


if __name__ == "__main__":
    supervise(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
