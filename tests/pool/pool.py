"""The test process's side: starts the workers, sends them a function, and collects what each rank answers."""

import contextlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import TCPStore

from tests.pool.protocol import Hello, RankError, Success, Task, WorkerFailure

T = TypeVar("T")
_Outcome = Success | RankError

_ROOT = Path(__file__).parents[2]
_HOST = "127.0.0.1"
_START_TIMEOUT = 100.0
# c10d asks the name server for the name of 127.0.0.1 at each connection; a lost answer would cost 5 s.
RESOLVER = "timeout:1 attempts:1"
"""For `RES_OPTIONS`."""
_DIED = "WorkerDied"
_SETTLE = 0.05
_STACKS_SIGNAL = signal.SIGUSR2


class _Worker:
    """A process that waits for one task."""

    def __init__(self, connection: Connection, hello: Hello, folder: Path) -> None:
        self.connection = connection
        self.pid = hello.pid
        self.previous = hello.previous
        self._log = folder / f"{hello.pid}.log"
        self._stacks = folder / f"{hello.pid}.stacks"

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def ask_stacks(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, _STACKS_SIGNAL)

    def stacks(self) -> str:
        return self._stacks.read_text() or "no stacks: the process did not react"

    def kill(self) -> None:
        """Ends the process and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def discard(self) -> None:
        self.kill()
        self.connection.close()
        self._log.unlink()
        self._stacks.unlink()


class WorkerPool:
    """Runs functions in up to `size` processes; started at the first run.

    Every run has fresh processes, forked by supervisors that have imported torch and Lightning, a rendezvous of its
    own, and the environment variables that `torchrun` sets. All of them end with the process that owns the pool.

    Args:
        size: Largest world size.
        backend: Backend of the default process group.
        grace: Seconds that the other ranks have to answer after one has failed.
        environment: Variables that are set before anything is imported.

    Attributes:
        output: What each rank of the last run printed (stdout and stderr).
    """

    def __init__(
        self,
        size: int = 4,
        backend: str = "gloo",
        grace: float = 5.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.size = size
        self.backend = backend
        self.grace = grace
        self.environment = dict(environment or {})
        self.output: dict[int, str] = {}
        self._folder: Path | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._supervisors: list[subprocess.Popen[bytes]] = []
        self._idle: dict[int, _Worker] = {}

    def run(
        self,
        fn: Callable[..., T],
        world: int,
        *args: Any,
        timeout: float = 60.0,
        nodes: int = 1,
        group: bool = True,
        **kwargs: Any,
    ) -> list[T]:
        """Calls `fn(*args, **kwargs)` in `world` processes that share a process group.

        Args:
            fn: Function at the top level of an importable module. What it returns is pickled; tensors are copied.
            world: Number of ranks.
            args: Positional arguments of `fn`.
            timeout: Seconds until ranks that have not answered are killed.
            nodes: Number of equal nodes that the variables pretend (`GROUP_RANK`, `LOCAL_RANK`, ...).
            group: Whether to initialise the default process group; without it, `env://` is ready to be used.
            kwargs: Keyword arguments of `fn`.

        Returns:
            The returned values by rank.

        Raises:
            WorkerFailure: If a rank raised, ended, or did not answer in time.
        """
        if not 1 <= world <= self.size or world % nodes:
            raise ValueError(f"`world={world}` must be in 1..{self.size} and a multiple of `nodes={nodes}`.")
        call = pickle.dumps((fn, args, kwargs))
        workers = self._take(world)
        store = _store()
        try:
            for rank, worker in workers.items():
                environment = _torchrun_environment(rank, world, nodes, store.port)
                task = Task(call, environment, self.backend if group else None, tuple(sys.path))
                worker.connection.send_bytes(pickle.dumps(task))
            outcomes = self._collect(workers, timeout)
            self.output = {rank: worker.output() for rank, worker in workers.items()}
        finally:
            for worker in workers.values():
                worker.discard()
        return self._results(outcomes)

    def close(self) -> None:
        """Kills every process of the pool."""
        for supervisor in self._supervisors:
            supervisor.kill()
        for worker in self._idle.values():
            worker.kill()
            worker.connection.close()
        for supervisor in self._supervisors:
            supervisor.wait()
        self._listener.close()
        self._supervisors, self._idle = [], {}
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="pool-"))
        self._listener.bind(str(folder / "pool.sock"))
        self._listener.listen()
        self._supervisors = [_start_supervisor(rank, folder, self.environment) for rank in range(self.size)]
        return folder

    def _take(self, world: int) -> dict[int, _Worker]:
        """The waiting workers of ranks 0 to `world` - 1."""
        self._folder = self._folder or self._start()
        self._await_workers(range(world))
        return {rank: self._idle.pop(rank) for rank in range(world)}

    def _await_workers(self, ranks: Iterable[int]) -> None:
        deadline = time.monotonic() + _START_TIMEOUT
        while missing := [rank for rank in ranks if rank not in self._idle]:
            if not self._accept(timeout=1.0):
                self._check_start(missing, late=time.monotonic() > deadline)

    def _accept(self, timeout: float) -> bool:
        """Greets one new worker; False if none came."""
        assert self._folder is not None
        self._listener.settimeout(timeout)
        try:
            client, _ = self._listener.accept()
        except TimeoutError:
            return False
        connection = Connection(client.detach())
        hello = pickle.loads(connection.recv_bytes())
        self._idle[hello.rank] = _Worker(connection, hello, self._folder)
        return True

    def _check_start(self, missing: list[int], late: bool) -> None:
        assert self._folder is not None
        for rank in missing:
            if late or self._supervisors[rank].poll() is not None:
                log = (self._folder / f"supervisor{rank}.log").read_text()
                raise RuntimeError(f"The worker of rank {rank} did not start.\n{log}")

    def _collect(self, workers: Mapping[int, _Worker], timeout: float) -> dict[int, _Outcome]:
        """The outcome of every rank; the likely cause of a failure comes first."""
        outcomes: dict[int, _Outcome] = {}
        waiting = {rank: worker.connection for rank, worker in workers.items()}
        deadline = time.monotonic() + timeout
        late = ("TimeoutError", f"no answer within {timeout:g} s")
        cause: int | None = None
        while waiting and (left := deadline - time.monotonic()) > 0:
            outcomes |= self._receive(waiting, left)
            if cause is None and _failed(outcomes):
                time.sleep(_SETTLE)
                outcomes = _died_first(outcomes | self._receive(waiting, 0))
                cause = next(iter(_failed(outcomes)))
                if (soon := time.monotonic() + self.grace) < deadline:
                    deadline, late = soon, ("NoAnswer", f"no answer {self.grace:g} s after rank {cause} failed")
            if cause is not None:
                for rank in outcomes:
                    workers[rank].kill()  # closes its sockets, as the end of a real rank would
        hung = {rank: workers[rank] for rank in waiting}
        return outcomes | {rank: RankError(*late, text) for rank, text in _stacks(hung).items()}

    def _receive(self, waiting: dict[int, Connection], timeout: float) -> dict[int, _Outcome]:
        """Reads the ranks that answer within `timeout`, and takes them from `waiting`."""
        readable = wait(waiting.values(), timeout)
        ranks = [rank for rank, connection in waiting.items() if connection in readable]
        return {rank: self._read(rank, waiting.pop(rank)) for rank in ranks}

    def _read(self, rank: int, connection: Connection) -> _Outcome:
        try:
            outcome = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._await_workers([rank])
            return RankError(_DIED, f"exit code {self._idle[rank].previous}", "no traceback: see its output")
        assert isinstance(outcome, _Outcome)
        return outcome

    def _results(self, outcomes: Mapping[int, _Outcome]) -> list[Any]:
        results = {rank: outcome.value for rank, outcome in outcomes.items() if isinstance(outcome, Success)}
        if errors := _failed(outcomes):
            raise WorkerFailure(errors, results, self.output)
        return [results[rank] for rank in sorted(results)]


def _failed(outcomes: Mapping[int, _Outcome]) -> dict[int, RankError]:
    return {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, RankError)}


def _died_first(outcomes: Mapping[int, _Outcome]) -> dict[int, _Outcome]:
    """The peers of a rank that died see broken connections, and may say so before its death is known."""
    died = {rank: error for rank, error in _failed(outcomes).items() if error.type_name == _DIED}
    return died | dict(outcomes)


def _start_supervisor(rank: int, folder: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONHASHSEED": str(rank + 1),
        "PYTHONUNBUFFERED": "1",  # a killed worker loses no output
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",  # a library that starts threads at import makes fork unsafe
        "MKL_NUM_THREADS": "1",
        "RES_OPTIONS": os.environ.get("RES_OPTIONS", RESOLVER),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # a process on huge pages is forked in a quarter of the time
        "PYTHONMALLOC": "malloc",  # so that Python's objects lie there too
        **variables,
    }
    command = [sys.executable, "-m", "tests.pool.worker", str(rank), str(folder), str(os.getpid())]
    with open(folder / f"supervisor{rank}.log", "wb") as log:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _store() -> TCPStore:
    """A store of its own for each run, so that runs never meet."""
    listener = socket.create_server((_HOST, 0))  # IPv4: the name of ::ffff:127.0.0.1 is in no hosts file
    port = listener.getsockname()[1]
    return TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _torchrun_environment(rank: int, world: int, nodes: int, port: int) -> dict[str, str]:
    local = world // nodes
    variables = {
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": port,
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": rank % local,
        "LOCAL_WORLD_SIZE": local,
        "GROUP_RANK": rank // local,
        "GROUP_WORLD_SIZE": nodes,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the pool owns the store, as the agent of torchrun does
    }
    return {name: str(value) for name, value in variables.items()}


def _stacks(workers: Mapping[int, _Worker]) -> dict[int, str]:
    """Where the threads of each worker are."""
    for worker in workers.values():
        worker.ask_stacks()
    if workers:
        time.sleep(0.5)
    return {rank: worker.stacks() for rank, worker in workers.items()}
