"""A script in which one rank fails: `python faulty.py FOLDER LAUNCH FAULT [KEY=VALUE ...]`.

Each rank leaves its process id, and writes down the exception that its run ended with. The time of the fault is left in
a file.
"""

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_commopt import CommOptStrategy
from lightning_commopt.failure import meeting, watch

STEP = 5
"""Step of the fault."""


@dataclass
class Plan:
    """What is to happen.

    Args:
        folder: For what ranks leave.
        launch: ``"popen"``, ``"spawn"``, ``"fork"``, ``"torchrun"`` or ``"mpirun"``.
        fault: Its name; see :class:`Faulty`.
        rank: Where it happens.
        ranks: World size.
        compression: Of the strategy.
        stall: ``stall_timeout`` in seconds, 0 for None.
        callback: ``"on_exception"`` or ``"save_on_exception"`` for an emergency checkpoint.
        workers: Of the data loader.
        nodes: Pretended nodes; ranks of different ones see each other by heartbeat.
        steps: Of the run.
        beat: Of the watch, in seconds; 0 for its own.
    """

    folder: Path
    launch: str
    fault: str
    rank: int = 1
    ranks: int = 3
    compression: str = "int8"
    stall: float = 0.0
    callback: str = ""
    workers: int = 0
    nodes: int = 1
    steps: int = 12
    beat: float = 0.0

    @classmethod
    def of(cls, words: list[str]) -> "Plan":
        """From the command line."""
        values: dict[str, Any] = dict(word.split("=") for word in words[3:])
        for name, value in values.items():
            values[name] = type(getattr(cls, name))(value)
        return cls(Path(words[0]), words[1], words[2], **values)


class Faulty(pl.LightningModule):
    """A small network; one rank does what is planned."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 48))
        self.plan = plan

    @override
    def on_fit_start(self) -> None:
        (self.plan.folder / f"pid.{self.global_rank}").write_text(str(os.getpid()))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        time.sleep(0.02)
        loss: Tensor = self.layers(batch).square().mean()
        if self.global_rank != self.plan.rank or self.global_step != STEP:
            return loss
        fault = self.plan.fault
        if fault in ("kill", "stop", "term"):
            number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[fault]
            next(self.parameters()).register_hook(lambda gradient: self.send(number))  # in the middle of backward
            return loss
        if fault in ("nothing", "loop-data"):
            return loss
        self.mark()
        return self.fail(fault)

    def fail(self, fault: str) -> Tensor | None:
        """Do it."""
        if fault == "raise":
            raise ValueError("planted: bad sample")
        if fault == "interrupt":
            raise KeyboardInterrupt
        if fault == "sysexit":
            sys.exit(3)
        if fault == "exit":
            os._exit(3)
        if fault == "loop":
            endless_loop()
        if fault == "gil":
            hold_interpreter()
        if fault == "constant":
            return torch.tensor(1.0)
        if fault == "leaf":
            return torch.tensor(1.0, requires_grad=True)
        if fault == "unused":
            return torch.zeros((), requires_grad=True) * 2
        assert fault == "none", fault
        return None

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        if self.plan.fault == "loop-data" and (self.global_rank, self.global_step) == (self.plan.rank, STEP):
            self.mark()
            endless_loop()

    def send(self, number: int) -> None:
        """Send a signal to this process, once."""
        if not (self.plan.folder / "fault").exists():
            self.mark()
            os.kill(os.getpid(), number)

    def mark(self) -> None:
        """Leave the time of the fault."""
        (self.plan.folder / "fault").write_text(str(time.time()))

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def endless_loop() -> None:
    """Go on for ever."""
    while True:
        time.sleep(0.01)


def hold_interpreter() -> None:
    """Keep all threads of this process from running, for very long."""
    import ctypes

    ctypes.PyDLL(None).sleep(1000)


class Report(pl.Callback):
    """Writes down how the run of this rank ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if dist.is_initialized():  # under `spawn` this is the parent, which is no rank
            self.write(trainer.global_rank, type(exception).__name__, str(exception))

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        total = sum(p.double().sum().item() for p in pl_module.parameters())
        self.write(trainer.global_rank, "nothing", f"{trainer.global_step} {total:.12f}")

    def write(self, rank: int, kind: str, text: str) -> None:
        """Leave a file."""
        (self.folder / f"end.{rank}.json").write_text(json.dumps([kind, text]))


def report_from_workers(folder: Path) -> None:
    """Under `spawn` and `fork` no callback hears of an exception in a worker."""
    failed = watch.Watch.failed

    def reporting(self: watch.Watch, error: BaseException) -> BaseException:
        outcome = failed(self, error)
        Report(folder).write(self._node.rank, type(outcome).__name__, str(outcome))
        return outcome

    watch.Watch.failed = reporting  # type: ignore[method-assign]


def pretend_nodes(plan: Plan) -> None:
    """Let ranks believe that consecutive ones share a node."""
    real = meeting.node_identity
    meeting.node_identity = lambda: f"{real()} {int(os.environ.get('LOCAL_RANK', 0)) * plan.nodes // plan.ranks}"


def main(plan: Plan) -> None:
    """Fit."""
    if plan.nodes > 1:
        pretend_nodes(plan)
    strategy = CommOptStrategy(
        plan.compression,
        stall_timeout=plan.stall or None,
        start_method="spawn" if plan.launch == "spawn" else "fork" if plan.launch == "fork" else "popen",
    )
    if plan.beat:
        strategy._limits = watch.Limits(beat_s=plan.beat)
    callbacks: list[pl.Callback] = [
        Report(plan.folder),
        ModelCheckpoint(
            plan.folder / "kept",
            filename="{step}",
            every_n_train_steps=2,
            save_on_exception=plan.callback == "save_on_exception",
        ),
    ]
    if plan.callback == "on_exception":
        callbacks.append(OnExceptionCheckpoint(plan.folder / "emergency"))
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=plan.ranks,
        max_steps=plan.steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    data: Any = torch.randn(256 * plan.ranks, 64, generator=torch.Generator().manual_seed(1))
    trainer.fit(Faulty(plan), DataLoader(data, batch_size=4, num_workers=plan.workers))


if __name__ in ("__main__", "__mp_main__") and sys.argv[2] in ("spawn", "fork"):
    report_from_workers(Path(sys.argv[1]))

if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Plan.of(sys.argv[1:]))
