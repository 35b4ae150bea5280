"""A tiny model whose learning rates are written down at every optimizer step, and one fit of it."""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning_utilities.core import rank_zero
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_commopt.callbacks import LinearLRScaling
from tests.pool import trainer

__all__ = [
    "BASE",
    "Fit",
    "Saved",
    "Toy",
    "Vectors",
    "fit",
    "fit_with",
    "loader",
    "make_trainer",
    "rates",
    "scaled_fp16",
]

BASE = 0.1
"""The learning rate of `Toy`."""


class Vectors(Dataset[Tensor]):
    """Random samples of two numbers."""

    def __init__(self, samples: int) -> None:
        self.data = torch.randn(samples, 2, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]


class Toy(LightningModule):
    """Two layers, one parameter group each.

    Args:
        schedule: Makes what `configure_optimizers` returns from the optimizer.
        spoilt: `(rank, step)` whose loss is infinite; None for no such step.
    """

    def __init__(
        self, schedule: Callable[[Optimizer], Any] | None = None, spoilt: tuple[int, int] | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 1)
        self.schedule = schedule
        self.spoilt = spoilt
        self.lr = BASE
        self.used: list[tuple[float, ...]] = []

    def loss(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.second(self.first(batch)).square().mean()
        return loss * float("inf") if self.spoilt == (self.global_rank, self.trainer.global_step) else loss

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("falling", 1.0 / (1 + min(batch_idx + self.current_epoch, 2)))  # for plateaus; the same in any run
        return self.loss(batch)

    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.used.append(rates(optimizer))

    @override
    def configure_optimizers(self) -> Any:
        groups: list[dict[str, Any]] = [
            {"params": self.first.parameters()},
            {"params": self.second.parameters(), "lr": self.lr / 8},
        ]
        optimizer = SGD(groups, self.lr)
        return optimizer if self.schedule is None else self.schedule(optimizer)


@dataclass
class Fit:
    """What one rank saw of a fit.

    Args:
        used: Rates of all groups at every optimizer step, skipped ones included.
        left: Rates after the fit, by optimizer.
        lines: What was logged at level INFO about scaling.
        warnings: Texts of all warnings.
        state: State of the scaling callback after the fit; empty without one.
    """

    used: list[tuple[float, ...]]
    left: list[tuple[float, ...]]
    lines: list[str]
    warnings: list[str]
    state: dict[str, Any]

    @property
    def first(self) -> list[float]:
        """Rates of the first group."""
        return [step[0] for step in self.used]


class Saved(Callback):
    """Saves a checkpoint after some optimizer step.

    Args:
        folder: Where.
        step: After which one.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / f"step{step}.ckpt"
        self.step = step
        self.done = False

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.step and not self.done:
            self.done = True
            trainer.save_checkpoint(self.path)


def rates(optimizer: Optimizer) -> tuple[float, ...]:
    """The rates of all groups."""
    return tuple(float(group["lr"]) for group in optimizer.param_groups)


def loader(batches: int, batch_size: int = 16, ranks: int = 1) -> "DataLoader[Tensor]":
    """A loader that gives every rank so many batches."""
    return DataLoader(Vectors(batches * batch_size * ranks), batch_size)


def scaled_fp16() -> MixedPrecision:
    """Half precision on the CPU with a gradient scaler that grows often; Lightning itself would turn it into bf16."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    return MixedPrecision("16-mixed", "cpu", scaler)


def make_trainer(strategy: Any = "auto", **options: Any) -> Trainer:
    """A quiet Trainer, for all ranks of the pool's run or, where there is none, for this process."""
    if dist.is_initialized():
        return trainer(dist.get_world_size(), "ddp" if strategy == "auto" else strategy, **options)
    defaults = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(strategy=strategy, **(defaults | quiet | options))  # type: ignore[arg-type]


def fit(model: LightningModule, data: Any, *callbacks: Callback, ckpt_path: Any = None, **options: Any) -> Fit:
    """Fit, and tell what happened."""
    fitter = make_trainer(callbacks=list(callbacks), **({"max_epochs": 1} | options))
    return fit_with(fitter, model, data, ckpt_path)


def fit_with(fitter: Trainer, model: LightningModule, data: Any, ckpt_path: Any = None) -> Fit:
    """The same with a Trainer that may have fitted before."""
    with warnings.catch_warnings(record=True) as caught, _lines() as lines:
        warnings.simplefilter("always")
        fitter.fit(model, data, ckpt_path=ckpt_path)
    ours = [callback for callback in fitter.callbacks if isinstance(callback, LinearLRScaling)]
    return Fit(
        used=list(getattr(model, "used", [])),
        left=[rates(optimizer) for optimizer in fitter.optimizers],
        lines=[line for line in lines if "LinearLRScaling" in line],
        warnings=[str(w.message) for w in caught if "LinearLRScaling" in str(w.message)],
        state=ours[0].state_dict() if ours else {},
    )


@contextlib.contextmanager
def _lines() -> Iterator[list[str]]:
    """Collect what is logged at level INFO on rank 0."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = rank_zero.log
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield lines
    log.removeHandler(handler)
    log.setLevel(level)
