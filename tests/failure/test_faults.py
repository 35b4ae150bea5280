"""Faults of one rank among the pool's workers: who sees what."""

import copy
import gc
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor
from typing_extensions import override

from lightning_commopt import CommOptStrategy, RankFailure
from lightning_commopt.failure import meeting
from lightning_commopt.failure.watch import Limits
from tests.pool import WorkerFailure, WorkerPool, trainer
from tests.strategies.toy import Batch, Regression, batches, fit, fresh_loop, loader

pytestmark = pytest.mark.runs("commopt", "failing together")

QUICK = Limits(beat_s=0.1)
STEP = 2


class Sick(Regression):
    """Rank 1 does something wrong in one step."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if (self.global_rank, batch_idx) != (1, STEP):
            return loss
        return FAULTS[self.fault](loss)


def raise_error(loss: Tensor) -> Tensor:
    raise ValueError("planted: bad sample")


def interrupt(loss: Tensor) -> Tensor:
    raise KeyboardInterrupt


def send(number: signal.Signals) -> Callable[[Tensor], Tensor]:
    def to_oneself(loss: Tensor) -> Tensor:
        os.kill(os.getpid(), number)
        time.sleep(0.2)
        return loss

    return to_oneself


def sleep(loss: Tensor) -> Tensor:
    time.sleep(30)
    return loss


FAULTS: dict[str, Callable[[Tensor], Any]] = {
    "raise": raise_error,
    "interrupt": interrupt,
    "none": lambda loss: None,
    "constant": lambda loss: torch.tensor(1.0),
    "constant in a dict": lambda loss: {"loss": torch.tensor(1.0)},
    "leaf": lambda loss: torch.tensor(1.0, requires_grad=True),
    "unused": lambda loss: torch.zeros((), requires_grad=True) * 2,
    "kill": send(signal.SIGKILL),
    "stop": send(signal.SIGSTOP),
    "terminate": send(signal.SIGTERM),
    "sleep": sleep,
}


def strategy_of(compression: str = "int8", limits: Limits = QUICK, **options: Any) -> CommOptStrategy:
    strategy = CommOptStrategy(compression, **options)
    strategy._limits = limits
    return strategy


def run_sick(fault: str, compression: str, group_timeout_s: int = 600, **options: Any) -> None:
    options["timeout"] = timedelta(seconds=group_timeout_s)
    fit(strategy_of(compression, **options), Sick(fault), batches(6))


def failures(pool: WorkerPool, *arguments: Any, **options: Any) -> tuple[dict[int, tuple[str, str]], list[str]]:
    """Type and text by rank, and what was printed about it."""
    with pytest.raises(WorkerFailure) as caught:
        pool.run(*arguments, **options)
    outputs = pool.output.values()
    lines = [line for output in outputs for line in output.splitlines() if line.startswith("commopt: rank ")]
    return {rank: (error.type_name, error.message) for rank, error in caught.value.errors.items()}, lines


RAISED = {
    "raise": (
        "ValueError",
        "planted: bad sample",
        "in training_step of step 2, raised ValueError: planted: bad sample",
    ),
    "interrupt": ("SystemExit", "1", "in training_step of step 2, raised KeyboardInterrupt (test_faults.py:"),
    "none": (
        "RuntimeError",
        "`training_step` on rank 1 at step 2 returned `None`",
        "raised RuntimeError: `training_",
    ),
    "constant": ("RuntimeError", "on rank 1 at step 2 returned a loss that does not require a gradient", "raised Runt"),
    "constant in a dict": ("RuntimeError", "a loss that does not require a gradient", "raised RuntimeError"),
    "leaf": ("RuntimeError", "depend", "in backward of step 2, raised RuntimeError: "),
    "unused": ("RuntimeError", "depend", "in backward of step 2, raised RuntimeError: "),
}


@pytest.mark.parametrize("compression", ["int8", "none"])
@pytest.mark.parametrize("fault", RAISED)
def test_an_error_of_one_rank_is_known_to_all(pool: WorkerPool, fault: str, compression: str) -> None:
    kind, text, message = RAISED[fault]
    found, said = failures(pool, run_sick, 3, fault, compression)
    assert found[1][0] == kind
    assert text in found[1][1]
    assert found[0] == found[2]
    assert found[0][0] == "RankFailure"
    assert found[0][1].startswith("rank 1, in ")
    assert message in found[0][1]
    assert said == [f"commopt: {found[0][1]}"]


@pytest.mark.parametrize(
    ("fault", "options", "message"),
    [
        ("kill", {}, "rank 1, in training_step of step 2, ended without a word (pid "),
        ("stop", {}, "rank 1, in training_step of step 2, was stopped (SIGSTOP, pid "),
        ("sleep", {"stall_timeout": 1}, "rank 1, in training_step of step 2, does not go on, and others waited for it"),
        (
            "sleep",
            {"stall_timeout": 60, "group_timeout_s": 2},
            "rank 1, in training_step of step 2, does not go on, and the connection was lost",
        ),
    ],
    ids=["kill", "stop", "sleep", "timeout"],
)
def test_a_rank_that_cannot_speak_is_named_by_the_others(
    pool: WorkerPool, fault: str, options: dict[str, Any], message: str
) -> None:
    found, said = failures(pool, run_sick, 3, fault, "int8", **options)
    assert found[1][0] == "WorkerDied"
    assert found[0] == found[2]
    assert found[0][0] == "RankFailure"
    assert found[0][1].startswith(message)
    assert said == [f"commopt: {found[0][1].splitlines()[0]}"]
    assert (fault == "sleep") == ("time.sleep(30)" in found[0][1])


class StopsAlone(pl.Callback):
    """Ends the fit of one rank after four batches."""

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.global_rank == 1 and trainer.global_step == 4


def run_stopping_alone() -> None:
    fit(strategy_of(stall_timeout=1), Regression(), batches(6), callbacks=[StopsAlone()])


def test_a_rank_that_ends_early_is_named(pool: WorkerPool) -> None:
    found, said = failures(pool, run_stopping_alone, 3)
    assert said == [
        "commopt: rank 1, between batches after step 3, ended its run early (had it fewer batches?), and others waited "
        "for it for 1 s; all ranks end."
    ]
    assert found == dict.fromkeys((0, 2), ("WorkerDied", "exit code 18"))  # nothing wakes them while rank 1 lives on


# ---- over nodes -----------------------------------------------------------------------------------------------------


def apart() -> None:
    """Let every rank be a node of its own."""
    real = meeting.node_identity
    meeting.node_identity = lambda: f"{real()} {dist.get_rank()}"


def run_apart(fault: str, **options: Any) -> None:
    apart()
    run_sick(fault, "int8", limits=Limits(beat_s=0.1, silent=12), **options)


@pytest.mark.parametrize(
    ("fault", "options", "message"),
    [
        ("raise", {}, "rank 1, in training_step of step 2, raised ValueError: planted: bad sample"),
        ("kill", {}, "rank 1, in "),  # where it was last heard of
        ("sleep", {"stall_timeout": 1}, "rank 1, in training_step of step 2, does not go on, and others waited for it"),
    ],
    ids=["raise", "kill", "sleep"],
)
def test_over_nodes(pool: WorkerPool, fault: str, options: dict[str, Any], message: str) -> None:
    found, said = failures(pool, run_apart, 3, fault, **options)
    assert found[0] == found[2]
    assert found[0][0] == "RankFailure"
    assert found[0][1].startswith(message), found
    assert (fault == "sleep") == ("time.sleep(30)" in found[0][1])
    silent = ("is silent, and the connection to it was lost", "was last heard of 1 s ago")
    assert (fault == "kill") == any(words in found[0][1] for words in silent)
    assert set(said) == {f"commopt: {found[0][1].splitlines()[0]}"}


def test_a_stopped_rank_on_another_node_is_given_up(pool: WorkerPool) -> None:
    found, said = failures(pool, run_apart, 3, "stop", timeout=10.0)
    assert said[0].startswith("commopt: rank 1, in ")
    assert "was last heard of 1 s ago" in said[0]
    assert [found[rank][:2] for rank in (0, 2)] == [("WorkerDied", "exit code 18")] * 2  # nothing wakes them


# ---- SIGTERM --------------------------------------------------------------------------------------------------------


def run_terminated() -> tuple[str, int]:
    fitter = trainer(3, strategy_of(), max_epochs=1, use_distributed_sampler=False, callbacks=[Slow()])
    try:
        fitter.fit(Sick("terminate"), loader(batches(40)))
    except SystemExit as error:
        return type(error).__name__, fitter.global_step
    return "nothing was raised", fitter.global_step


class Slow(pl.Callback):
    """Lets every batch take its time."""

    @override
    def on_train_batch_start(self, *args: Any) -> None:
        time.sleep(0.03)


def test_sigterm_of_one_rank_ends_all_before_the_same_batch(pool: WorkerPool) -> None:
    ranks = pool.run(run_terminated, 3)
    assert ranks == [ranks[0]] * 3
    assert ranks[0][0] == "SIGTERMException"
    assert STEP < ranks[0][1] < 40
    assert sum("got SIGTERM; all ranks end." in output for output in pool.output.values()) == 1


class TerminatedThere(Regression):
    """Rank 1 gets SIGTERM while all validate."""

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        time.sleep(0.05)
        if (self.global_rank, batch_idx) == (1, STEP):
            os.kill(os.getpid(), signal.SIGTERM)
        return super().validation_step(batch, batch_idx)


def run_terminated_validation() -> None:
    fitter = trainer(3, strategy_of(), use_distributed_sampler=False)
    fitter.validate(TerminatedThere(), loader(batches(20)), verbose=False)
    fitter.strategy.barrier()


def test_sigterm_in_validation(pool: WorkerPool) -> None:
    found, said = failures(pool, run_terminated_validation, 3)
    assert found[1][0] == "SIGTERMException"
    assert "got SIGTERM; all ranks end." in said[0]
    assert len(said) == 1


# ---- what is no failure ---------------------------------------------------------------------------------------------


class SlowThere(Regression):
    """Rank 0 takes longer than `stall_timeout` where it may."""

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        time.sleep(1.5 * (self.global_rank == 0))
        return super().validation_step(batch, batch_idx)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        time.sleep(1.5 * (self.global_rank == 0))

    @override
    def setup(self, stage: str) -> None:
        time.sleep(1.5 * (self.global_rank == 0))


def run_slowly(folder: Path) -> int:
    options: dict[str, Any] = {"max_epochs": 1, "use_distributed_sampler": False, "enable_checkpointing": True}
    callback = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
    fitter = trainer(2, strategy_of(stall_timeout=1), callbacks=[callback], num_sanity_val_steps=0, **options)
    fitter.fit(SlowThere(), loader(batches(2)), loader(batches(1)))
    return fitter.global_step


def test_set_up_validation_and_checkpoints_may_take_long(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(run_slowly, 2, tmp_path) == [2, 2]


class SlowStep(Regression):
    """Rank 1 takes its time once."""

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        time.sleep(2.0 * (self.global_rank == 1 and batch_idx == STEP))
        return super().training_step(batch, batch_idx)


def run_warned() -> int:
    return fit(strategy_of(limits=Limits(beat_s=0.1, warn=10), stall_timeout=30), SlowStep(), batches(4)).steps


def test_an_awaited_rank_is_named_before_the_limit(pool: WorkerPool) -> None:
    assert pool.run(run_warned, 3) == [4] * 3
    lines = [line for output in pool.output.values() for line in output.splitlines() if "commopt: rank" in line]
    assert lines == ["commopt: rank 1, in training_step of step 2, does not go on; others have waited for it for 1 s."]


# ---- the last checkpoint --------------------------------------------------------------------------------------------


def run_with_last_checkpoint(folder: Path, of_callback: bool) -> None:
    callback: Any = OnExceptionCheckpoint(folder, "last")
    if not of_callback:
        callback = ModelCheckpoint(folder, "last", every_n_epochs=9, save_on_exception=True)
    fit(strategy_of(), Sick("raise"), batches(6), callbacks=[callback], enable_checkpointing=True)


@pytest.mark.parametrize("of_callback", [True, False], ids=["OnExceptionCheckpoint", "save_on_exception"])
def test_a_checkpoint_on_the_way_out_waits_for_nobody(pool: WorkerPool, tmp_path: Path, of_callback: bool) -> None:
    found, _ = failures(pool, run_with_last_checkpoint, 3, tmp_path, of_callback)
    assert [found[rank][0] for rank in range(3)] == ["RankFailure", "ValueError", "RankFailure"]
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["global_step"] == STEP
    assert saved["state_dict"]


# ---- life of a watch ------------------------------------------------------------------------------------------------


def threads_of_a_life(nodes_apart: bool) -> list[tuple[list[str], int]]:
    """Names of our threads and number of open files, before, during and after runs of one strategy."""
    if nodes_apart:
        apart()
    seen = []

    def look() -> None:
        gc.collect()
        names = sorted(t.name for t in threading.enumerate() if t.name.startswith("lightning_commopt"))
        seen.append((names, len(os.listdir("/proc/self/fd"))))

    class Look(pl.Callback):
        @override
        def on_train_end(self, *args: Any) -> None:
            look()

    fitter = trainer(2, strategy_of(), max_epochs=1, use_distributed_sampler=False, callbacks=[Look()])
    model = Regression()
    for _ in range(3):
        fitter.fit(model, loader(batches(2)), loader(batches(1)))
        fitter.fit_loop = fresh_loop(fitter)
        fitter.validate(model, loader(batches(1)), verbose=False)
        fitter.test(model, loader(batches(1)), verbose=False)
        look()
    return seen


@pytest.mark.parametrize("nodes_apart", [False, True])
def test_nothing_of_a_watch_outlives_its_run(pool: WorkerPool, nodes_apart: bool) -> None:
    for seen in pool.run(threads_of_a_life, 2, nodes_apart):
        during, after = seen[0::2], seen[1::2]
        threads = [
            "lightning_commopt",
            *(["lightning_commopt beats"] if nodes_apart else []),
            "lightning_commopt watch",
        ]
        assert [names for names, _ in during] == [threads] * 3
        assert [names for names, _ in after] == [[]] * 3
        assert after[1][1] == after[2][1]  # open files


def fail_after_a_good_run() -> None:
    fitter = trainer(3, strategy_of(), max_epochs=1, use_distributed_sampler=False)
    fitter.fit(Regression(), loader(batches(2)))
    fitter.fit_loop = fresh_loop(fitter)
    fitter.fit(Sick("kill"), loader(batches(6)))


def test_a_goodbye_of_an_earlier_run_hides_no_death(pool: WorkerPool) -> None:
    found, _ = failures(pool, fail_after_a_good_run, 3)
    assert found[0] == found[2]
    assert "rank 1, in training_step of step 2, ended without a word" in found[0][1]


def all_raise() -> list[str]:
    """All ranks raise alike, several times in one process."""
    texts = []
    for _ in range(3):
        try:
            fit(strategy_of(), AllRaise(), batches(4))
        except ZeroDivisionError as error:
            texts.append(str(error))
    return [*texts, str(fit(strategy_of(), Regression(), batches(2)).steps)]


def raise_after_teardown() -> str:
    class Late(pl.Callback):
        @override
        def on_fit_end(self, *args: Any) -> None:
            raise ValueError("late")

    with pytest.raises(ValueError, match="late"):
        fit(strategy_of(), Regression(), batches(2), callbacks=[Late()])
    return "raised"


def test_an_error_after_teardown_is_the_users_own(pool: WorkerPool) -> None:
    assert pool.run(raise_after_teardown, 2) == ["raised"] * 2


class AllRaise(Regression):
    """Raises everywhere."""

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        raise ZeroDivisionError("everywhere")


def test_an_error_of_all_ranks_keeps_its_type(pool: WorkerPool) -> None:
    started = time.monotonic()
    assert pool.run(all_raise, 3) == [["everywhere"] * 3 + ["2"]] * 3
    print(f"{time.monotonic() - started:.1f} s")
    assert sum(output.count("raised ZeroDivisionError: everywhere") for output in pool.output.values()) == 3


def watch_of_one_process() -> bool:
    strategy = strategy_of()
    fit(strategy, Regression(), batches(2))
    return strategy.watch is None


def test_one_process_is_not_watched(pool: WorkerPool) -> None:
    assert pool.run(watch_of_one_process, 1) == [True]


def copies_of_a_watched_strategy() -> list[bool]:
    seen = []

    class Copy(pl.Callback):
        @override
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            strategy: Any = trainer.strategy
            state = strategy.__getstate__()
            seen.extend([strategy.watch is not None, state["watch"] is None, state["_sigterm"] is None])

    fit(strategy_of(), Regression(), batches(2), callbacks=[Copy()])
    return seen


def test_a_watched_strategy_can_be_copied(pool: WorkerPool) -> None:
    assert pool.run(copies_of_a_watched_strategy, 2) == [[True] * 3] * 2
    strategy = CommOptStrategy("int8", stall_timeout=60)
    for other in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert (other.stall_timeout, other.watch) == (60, None)
    error = pickle.loads(pickle.dumps(RankFailure("rank 1")))
    assert str(error) == "rank 1"


# ---- the constant-loss check of `none` ------------------------------------------------------------------------------


class Accumulated(Regression):
    """Leaves its parameters out where nothing is exchanged."""

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return torch.zeros((), requires_grad=True) * 2 if self.global_rank == 1 and batch_idx == 0 else loss


def unused_while_accumulating() -> int:
    return fit(strategy_of("none"), Accumulated(), batches(4), accumulate_grad_batches=2).steps


def test_a_loss_without_parameters_is_right_where_ddp_does_not_wait(pool: WorkerPool) -> None:
    assert pool.run(unused_while_accumulating, 2) == [2, 2]
