"""What all checks have in common, and what they look at."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypeVar

import lightning.pytorch as pl
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_commopt.callbacks.doctor.finding import Finding
from lightning_commopt.callbacks.doctor.options import DoctorOptions
from lightning_commopt.callbacks.monitor.views import ModelView
from lightning_commopt.failure import FailTogether
from lightning_commopt.routes import ControlGroup

__all__ = ["Check", "Run", "loss_of"]

T = TypeVar("T")


class Run:
    """The fit that is looked at. Made on all ranks at once.

    Args:
        trainer: In set-up; its process group exists.
        view: What its strategy shows.
        options: What was asked for.

    Attributes:
        steps_done: Optimizer steps since the fit began.

    """

    def __init__(self, trainer: "pl.Trainer", view: ModelView, options: DoctorOptions) -> None:
        self.trainer = trainer
        self.view = view
        self.options = options
        self.rank, self.world = trainer.global_rank, trainer.world_size
        self.steps_done = 0
        strategy = trainer.strategy
        self._own_group = self.world > 1 and not isinstance(strategy, FailTogether)
        self.control: ControlGroup | None = None
        if self.world > 1:
            ours = isinstance(strategy, FailTogether)
            self.control = strategy._control if ours else ControlGroup(getattr(strategy, "_timeout", None))

    @property
    def module(self) -> "pl.LightningModule":
        """The module in training."""
        return self.trainer.lightning_module

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's object, by rank. A collective."""
        return [value] if self.control is None else self.control.all_gather(value)

    def close(self) -> None:
        """Free what was made for this fit."""
        if self._own_group and self.control is not None and dist.is_initialized():
            dist.destroy_process_group(self.control.group)
        self.control = None


class Check(ABC):
    """Looks at one side of a fit. It hears of events in the first steps, then says what it found.

    A subclass overrides the events that it needs. None of them may change the fit, and only :meth:`before_wrapping`,
    :meth:`train_start`, :meth:`batch_end` and :meth:`findings` may talk to other ranks, all at the same event.

    Args:
        run: The fit.

    Attributes:
        name: How findings call it.
        lasting: Whether it goes on to the end of the fit, and is asked again there.

    """

    name: ClassVar[str]
    lasting: ClassVar[bool] = False

    def __init__(self, run: Run) -> None:
        self.run = run

    def before_wrapping(self) -> None:  # noqa: B027 - most checks need few events
        """Look at the module before its strategy makes all ranks equal."""

    def train_start(self) -> None:  # noqa: B027
        """Begin: optimizers and data are there."""

    def batch_start(self, batch: Any, batch_idx: int) -> None:  # noqa: B027
        """See a batch on its device."""

    def after_backward(self) -> None:  # noqa: B027
        """Note that a backward pass has ended."""

    def before_optimizer_step(self, optimizer: Optimizer) -> None:  # noqa: B027
        """See an optimizer that is about to step."""

    def batch_end(self, outputs: Any, steps: int) -> None:  # noqa: B027
        """Note that a batch has ended, and ``steps`` optimizer steps with it (0 while gradients accumulate)."""

    def interrupted(self) -> None:  # noqa: B027
        """Note that something else comes between two batches: validation, or the end of an epoch."""

    @abstractmethod
    def findings(self) -> list[Finding]:
        """Say what was seen so far, the same on every rank. A collective."""

    def close(self) -> None:  # noqa: B027
        """Leave no trace. No effect the second time."""

    # ---- answers ----------------------------------------------------------------------------------------------------

    def found(self, message: str, remedy: str, *, rank: int | None = None, number: float | None = None) -> Finding:
        """Something is wrong."""
        return Finding(self.name, True, message, rank, number, remedy)

    def fine(self, message: str, *, number: float | None = None) -> Finding:
        """Nothing is wrong."""
        return Finding(self.name, False, message, number=number)

    def unchecked(self, why: str, remedy: str = "") -> Finding:
        """Nobody knows."""
        return Finding(self.name, False, why, remedy=remedy, checked=False)


def loss_of(outputs: Any) -> Tensor | None:
    """Return the loss in what a training step gave, as Lightning passes it to callbacks; None where there is none."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return loss.detach().float() if isinstance(loss, Tensor) and loss.numel() == 1 else None
