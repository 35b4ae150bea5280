"""The learning rate for one device's batch, and the one for the batch of all ranks."""

import functools
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.tuner import Tuner

from lightning_commopt.callbacks.doctor.check import loss_of
from lightning_commopt.trials.faults import TargetError, told
from lightning_commopt.trials.one_process import alone, with_batch_size
from lightning_commopt.trials.target import Target

__all__ = ["FoundRate", "find_rate", "steepest"]

_FALLS = 0.98  # of the loss at the smallest rates

_ADAPTIVE = ("Ada", "Adam", "NAdam", "RAdam", "RMSprop", "LAMB", "Lion")


@dataclass(frozen=True)
class FoundRate:
    """What a test of many rates suggests.

    Args:
        suggested: For one device's batch.
        own: What the user's optimizer has.
        optimizer: Its class.
        batch_size: One device's batch, for which the rate was found.

    """

    suggested: float
    own: float
    optimizer: str
    batch_size: int

    @property
    def rule(self) -> Literal["linear", "sqrt"]:
        """How the rate grows with the batch: by its square root for adaptive optimizers."""
        return "sqrt" if self.optimizer.startswith(_ADAPTIVE) else "linear"

    def peak(self, effective_batch: int) -> float:
        """Return the rate that ``LinearLRScaling`` reaches after its warm-up."""
        ratio = effective_batch / self.batch_size
        return self.suggested * (math.sqrt(ratio) if self.rule == "sqrt" else ratio)


def steepest(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Return the rate at which the loss falls most steeply over the logarithm of the rate.

    Losses are smoothed by the mean over a tenth of them around each. Lightning's own suggestion takes the slope over
    the rate itself, which is steepest in the noise at the smallest rates, of a running mean that lags behind. Source:
    Smith, "Cyclical Learning Rates for Training Neural Networks" (arXiv 1506.01186), section 3.3.

    Args:
        rates: Growing.
        losses: As many.

    Returns:
        None where the loss falls nowhere below 98 % of what it was at the smallest rates.

    """
    points = [(math.log(rate), loss) for rate, loss in zip(rates, losses, strict=False) if math.isfinite(loss)]
    half = max(1, len(points) // 20)
    if len(points) < 4 * half + 2:
        return None
    logs = torch.tensor([log for log, _ in points[half:-half]], dtype=torch.float64)
    smoothed = torch.tensor([loss for _, loss in points], dtype=torch.float64).unfold(0, 2 * half + 1, 1).mean(1)
    if smoothed.min() > _FALLS * smoothed[: 2 * half + 1].mean():
        return None
    slopes = torch.gradient(smoothed, spacing=[logs])[0][: int(smoothed.argmin()) + 1]
    return math.exp(float(logs[int(slopes.argmin())]))


def find_rate(target: Target, name: str, batch_size: int, steps: int, *, set_batch: bool) -> FoundRate:
    """Raise the rate step by step in one process, by Lightning's ``lr_find``, and take the one of :func:`steepest`.

    Args:
        target: Makes Trainer and model.
        name: Attribute or hyperparameter that holds the batch size.
        batch_size: Samples of a batch.
        steps: Rates to try, one an optimizer step.
        set_batch: Whether the size is another than the user's.

    Raises:
        TargetError: There is more than one optimizer, or no rate can be suggested.
        ScriptError: The user's code raised an exception.

    """
    with tempfile.TemporaryDirectory(prefix="commopt-") as folder:
        setup = alone(target, folder, {"max_epochs": -1, "max_steps": steps})
        if set_batch:
            setup = with_batch_size(setup, name, batch_size)
        losses = _recorded_losses(setup.model)
        try:
            with told("training"):
                finder = Tuner(setup.trainer).lr_find(
                    setup.model, **setup.data_arguments(), num_training=steps, update_attr=False
                )
        except TargetError:
            print(file=sys.stderr)  # ends the line of Lightning's progress bar
            raise
        optimizers = setup.trainer.optimizers
        if len(optimizers) != 1:
            raise TargetError(f"the model has {len(optimizers)} optimizers, and the finder knows one")
    rate = None if finder is None else steepest(finder.results["lr"], losses)
    if rate is None:
        raise TargetError("the loss fell at none of the rates, or was not finite: take more `--lr-steps`")
    return FoundRate(rate, float(optimizers[0].defaults["lr"]), type(optimizers[0]).__name__, batch_size)


def _recorded_losses(model: "pl.LightningModule") -> list[float]:
    """Return a list to which every training step adds its loss."""
    losses: list[float] = []
    step = model.training_step

    @functools.wraps(step)
    def recorded(*args: Any, **options: Any) -> Any:
        output = step(*args, **options)
        loss = loss_of(output)
        losses.append(math.nan if loss is None else float(loss))
        return output

    model.training_step = recorded  # type: ignore[method-assign]
    return losses
