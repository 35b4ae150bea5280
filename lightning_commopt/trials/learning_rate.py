"""The learning rate for one device's batch, and the one for the batch of all ranks."""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from lightning.pytorch.tuner import Tuner

from lightning_commopt.trials.one_process import alone, with_batch_size
from lightning_commopt.trials.target import Target, TargetError

__all__ = ["FoundRate", "find_rate", "steepest"]

_UNSETTLED = 10  # losses before their running mean means something

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
    """Return the rate at which a smoothed loss falls most steeply over the logarithm of the rate.

    The slope over the rate itself, which Lightning's own suggestion takes, is steepest in the noise at the smallest
    rates. Source: Smith, "Cyclical Learning Rates for Training Neural Networks" (arXiv 1506.01186), section 3.3.

    Args:
        rates: Growing.
        losses: As many.

    Returns:
        None where the loss falls nowhere below 98 % of what it was.

    """
    points = [(math.log(rate), loss) for rate, loss in zip(rates, losses, strict=True) if math.isfinite(loss)]
    points = points[_UNSETTLED:]
    if len(points) < 2 or min(loss for _, loss in points) > 0.98 * points[0][1]:
        return None
    logs, smoothed = (torch.tensor(values, dtype=torch.float64) for values in zip(*points, strict=True))
    slopes = torch.gradient(smoothed, spacing=[logs])[0]
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

    """
    with tempfile.TemporaryDirectory(prefix="commopt-") as folder:
        setup = alone(target, folder, {"max_epochs": -1, "max_steps": steps})
        if set_batch:
            setup = with_batch_size(setup, name, batch_size)
        finder = Tuner(setup.trainer).lr_find(
            setup.model, **setup.data_arguments(), num_training=steps, update_attr=False
        )
        optimizers = setup.trainer.optimizers
        if len(optimizers) != 1:
            raise TargetError(f"the model has {len(optimizers)} optimizers, and the finder knows one")
    rate = None if finder is None else steepest(finder.results["lr"], finder.results["loss"])
    if rate is None:
        raise TargetError("the loss fell at none of the rates, or was not finite: take more `--lr-steps`")
    return FoundRate(rate, float(optimizers[0].defaults["lr"]), type(optimizers[0]).__name__, batch_size)
