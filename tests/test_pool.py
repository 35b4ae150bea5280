"""The pool itself: what a run returns, what a failure says, and that no process is left."""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from tests.pool import WorkerFailure, WorkerPool, trainer


def rank_and_sum(value: int) -> tuple[int, float]:
    """A collective in the default group."""
    tensor = torch.tensor(float(value + dist.get_rank()))
    dist.all_reduce(tensor)
    return dist.get_rank(), tensor.item()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results_come_by_rank(pool: WorkerPool, world: int) -> None:
    assert pool.run(rank_and_sum, world, value=1) == [(rank, world * (world + 1) / 2) for rank in range(world)]


def test_impossible_world_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(ValueError, match="world=5"):
        pool.run(rank_and_sum, 5, 1)
    with pytest.raises(ValueError, match="nodes=2"):
        pool.run(rank_and_sum, 3, 1, nodes=2)


def environment() -> tuple[str, ...]:
    """The variables that place a rank."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    return tuple(os.environ[name] for name in names)


def test_environment_is_that_of_torchrun(pool: WorkerPool) -> None:
    assert pool.run(environment, 4, nodes=2) == [
        ("0", "4", "0", "2", "0", "127.0.0.1"),
        ("1", "4", "1", "2", "0", "127.0.0.1"),
        ("2", "4", "0", "2", "1", "127.0.0.1"),
        ("3", "4", "1", "2", "1", "127.0.0.1"),
    ]


def init_by_hand() -> tuple[bool, float]:
    """The function makes the group from the environment."""
    before = dist.is_initialized()
    dist.init_process_group("gloo")
    return before, rank_and_sum(0)[1]


def test_group_can_be_left_to_the_function(pool: WorkerPool) -> None:
    assert pool.run(init_by_hand, 2, group=False) == [(False, 1.0)] * 2


def leave_traces() -> tuple[float, float, int, str | None, int, bool]:
    """Reads the state of the process, then changes it."""
    seen = (
        torch.rand(()).item(),
        torch.tensor(0.5).element_size(),
        torch.get_num_threads(),
        os.environ.get("TRACE"),
        threading.active_count(),
        ("ignore", None, UserWarning, None, 0) in warnings.filters,
    )
    os.environ["TRACE"] = "left"
    torch.set_default_dtype(torch.float64)
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    warnings.simplefilter("ignore", UserWarning)
    return seen


def test_runs_are_independent(pool: WorkerPool) -> None:
    first, second = pool.run(leave_traces, 2), pool.run(leave_traces, 2)
    assert first == second
    assert first[0] == first[1]
    assert first[0][1:] == (4, 1, None, 1, False)


def string_hash() -> int:
    """Differs between processes that were not forked from one."""
    return hash("a name")


def test_ranks_have_their_own_hash_seed(pool: WorkerPool) -> None:
    assert len(set(pool.run(string_hash, 4))) == 4


def threads_of_supervisor() -> int:
    """The number of native threads where this process was forked."""
    return int(psutil.Process(os.getppid()).num_threads())


def test_supervisor_is_safe_to_fork(pool: WorkerPool) -> None:
    assert pool.run(threads_of_supervisor, 4) == [1, 1, 1, 1]


def fail_on_rank_1() -> None:
    """The other ranks wait in a collective."""
    print(f"rank {dist.get_rank()} was here")
    if dist.get_rank() == 1:
        raise ValueError("a bad gradient")
    dist.all_reduce(torch.ones(1))


def test_exception_names_rank_type_and_place(pool: WorkerPool) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerFailure, match=r"^rank 1: ValueError: a bad gradient \(3 of 3 ranks failed\)") as caught:
        pool.run(fail_on_rank_1, 3)
    assert time.monotonic() - start < pool.grace
    assert caught.value.errors[1][:2] == ("ValueError", "a bad gradient")
    assert "in fail_on_rank_1" in caught.value.errors[1].traceback
    assert {0, 2} < caught.value.errors.keys()
    assert "rank 2 was here" in str(caught.value)
    assert pool.run(rank_and_sum, 3, 0)[2] == (2, 3.0)


def fail_alone(naps: float) -> str:
    """Rank 0 raises, rank 1 returns, rank 2 sleeps."""
    if dist.get_rank() == 0:
        raise KeyError("gone")
    if dist.get_rank() == 2:
        time.sleep(naps)
    return "well"


def test_other_ranks_have_a_grace(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "grace", 1.0)
    with pytest.raises(WorkerFailure, match="rank 2: NoAnswer: no answer 1 s after rank 0 failed") as caught:
        pool.run(fail_alone, 3, naps=60)
    assert list(caught.value.errors) == [0, 2]
    assert caught.value.results == {1: "well"}
    assert "in fail_alone" in caught.value.errors[2].traceback


def end_rank_1() -> None:
    """The process of rank 1 ends without a word to the pool."""
    if dist.get_rank() == 1:
        os.write(2, b"last words")
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def test_dead_rank_is_named_first(pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailure, match=r"^rank 1: WorkerDied: exit code 7") as caught:
        pool.run(end_rank_1, 3)
    assert caught.value.output[1] == "last words"
    assert pool.run(rank_and_sum, 2, 0)[0] == (0, 1.0)


def sleep_and_start_a_process() -> None:
    """Hangs, with a process of its own."""
    print(subprocess.Popen(["sleep", "60"]).pid)
    time.sleep(60)


def test_timeout_shows_stacks_and_kills(pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailure, match="TimeoutError: no answer within 2 s") as caught:
        pool.run(sleep_and_start_a_process, 2, timeout=2)
    assert all("in sleep_and_start_a_process" in error.traceback for error in caught.value.errors.values())
    assert ended(int(text) for text in pool.output.values())
    assert pool.run(rank_and_sum, 2, 0)[0] == (0, 1.0)


def return_function() -> object:
    """A value that cannot be pickled."""
    return lambda: None


def test_unpicklable_values_are_reported(pool: WorkerPool) -> None:
    with pytest.raises(Exception, match="pickle"):
        pool.run(lambda: None, 2)
    with pytest.raises(WorkerFailure, match="pickle"):
        pool.run(return_function, 2)


def test_output_is_kept(pool: WorkerPool) -> None:
    pool.run(print, 2, "hello")
    assert pool.output == {0: "hello\n", 1: "hello\n"}


def ended(pids: Iterable[int]) -> bool:
    """Whether all processes end within ten seconds; one that nobody has waited for counts as ended."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
            return True
        time.sleep(0.05)
    return False


_OWNER = """
import os, time
from tests.pool import WorkerPool
from tests.test_pool import family
pool = WorkerPool(size=1)
print(*pool.run(family, 1), flush=True)
pool._await_workers([0])
print(pool._idle[0].pid, flush=True)
pool.run(time.sleep, 1, 60)
"""


def family() -> str:
    """Process ids of this worker and its supervisor."""
    return f"{os.getpid()} {os.getppid()}"


def test_nothing_outlives_the_owner() -> None:
    command = [sys.executable, "-c", _OWNER]
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:  # a killed owner cannot remove its own
        environment = os.environ | {"TMPDIR": folder}
        with subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True) as owner:
            assert owner.stdout is not None
            pids = [int(pid) for _ in range(2) for pid in owner.stdout.readline().split()]
            owner.kill()
        assert len(pids) == 3
        assert ended(pids)


def test_close_ends_all() -> None:
    workers = WorkerPool(size=1)
    pids = [int(pid) for pid in workers.run(family, 1)[0].split()]
    workers.close()
    assert ended(pids)
    assert workers._folder is not None
    assert not workers._folder.exists()


def fit_twice(strategy: str) -> tuple[list[torch.Tensor], bool, int]:
    """Two Trainers after one another in one process."""
    group = dist.group.WORLD
    world = dist.get_world_size()
    for _ in range(2):
        model = BoringModel()
        fitter = trainer(world, strategy, max_epochs=1, limit_val_batches=0)
        fitter.fit(model, DataLoader(RandomDataset(32, 12)))
    return [p.detach() for p in model.parameters()], dist.group.WORLD is group, fitter.global_step


@pytest.mark.parametrize("world", [2, 3])
def test_lightning_trains_in_the_group_of_the_pool(pool: WorkerPool, world: int) -> None:
    ranks = pool.run(fit_twice, world, "ddp")
    assert [same_group for _, same_group, _ in ranks] == [True] * world
    assert [steps for _, _, steps in ranks] == [12 // world] * world
    for parameters, _, _ in ranks[1:]:
        torch.testing.assert_close(parameters, ranks[0][0], rtol=0, atol=0)


def fit_without_group() -> int:
    """Lightning makes the group."""
    world = int(os.environ["WORLD_SIZE"])
    trainer(world, max_steps=1, limit_val_batches=0).fit(BoringModel())
    return dist.get_world_size()


def test_lightning_can_make_the_group(pool: WorkerPool) -> None:
    assert pool.run(fit_without_group, 2, group=False) == [2, 2]
