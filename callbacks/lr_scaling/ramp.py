"""The course of the scale over applied optimizer steps."""

import math
from dataclasses import dataclass

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_commopt.callbacks.lr_scaling.options import LRScalingOptions

__all__ = ["LRRamp", "ramp_for", "steps_of_fit"]

_WARM_UP_EPOCHS = 5.0  # Goyal et al., 2017, section 2.2


@dataclass(frozen=True, kw_only=True)
class LRRamp:
    """A linear warm-up to ``factor``, and what follows.

    Args:
        warmup_steps: Applied steps until the peak is reached.
        start_factor: Where the warm-up begins, as a part of the peak. None: at the unscaled rate, ``1 / factor``; at
            the peak where ``factor`` is below 1.
        total_steps: Applied steps at the end of a cosine. None: constant after the warm-up.
        min_factor: Where the cosine ends, as a part of the peak.

    """

    warmup_steps: int
    start_factor: float | None = None
    total_steps: int | None = None
    min_factor: float = 0.0

    def scale(self, applied: int, factor: float) -> float:
        """Return what the learning rate is multiplied by after ``applied`` steps."""
        if applied < self.warmup_steps:
            start = min(1.0, 1.0 / factor) if self.start_factor is None else self.start_factor
            return factor * (start + (1.0 - start) * applied / self.warmup_steps)
        if self.total_steps is None:
            return factor
        done = min(1.0, (applied - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return factor * (self.min_factor + (1.0 - self.min_factor) * 0.5 * (1.0 + math.cos(math.pi * done)))

    def moves(self, applied: int) -> bool:
        """Whether the scale may still change after ``applied`` steps."""
        return applied < max(self.warmup_steps, self.total_steps or 0)


def ramp_for(trainer: "pl.Trainer", options: LRScalingOptions, accumulated: int) -> LRRamp:
    """Return what was asked for, in steps of a fit that accumulates so many batches in one.

    Raises:
        ValueError: Nobody knows how many steps an epoch, or the fit, has.

    """
    warmup = options.warmup_steps
    if warmup is None:
        warmup = _steps_of_epochs(trainer, options.warmup_epochs, accumulated)
    total = None
    if options.schedule == "cosine":
        total = options.total_steps or steps_of_fit(trainer)
        if total is None:
            raise ValueError(
                "`LinearLRScaling(schedule='cosine')` cannot tell how many optimizer steps this fit has: set "
                "`total_steps`."
            )
        if total <= warmup:
            raise ValueError(
                f"`LinearLRScaling(schedule='cosine')` ends after {total} steps, and the warm-up takes {warmup}: "
                "shorten the warm-up (`warmup_steps`), or set `total_steps`."
            )
    return LRRamp(
        warmup_steps=warmup, start_factor=options.start_factor, total_steps=total, min_factor=options.min_factor
    )


def steps_of_fit(trainer: "pl.Trainer") -> int | None:
    """Return how many optimizer steps a fit has; None where that is unknown."""
    if not trainer.lightning_module.automatic_optimization:
        return None
    try:
        steps = trainer.estimated_stepping_batches
    except MisconfigurationException:  # the accumulation changes between epochs
        return None
    return None if steps == math.inf else int(steps)


def _steps_of_epochs(trainer: "pl.Trainer", epochs: float | None, accumulated: int) -> int:
    """Return the optimizer steps of the warm-up's epochs; None stands for the default."""
    epochs = _WARM_UP_EPOCHS if epochs is None else epochs
    batches = trainer.num_training_batches
    if epochs and (batches == math.inf or not trainer.lightning_module.automatic_optimization):
        raise ValueError(
            f"`LinearLRScaling` cannot tell how many optimizer steps a warm-up of {epochs:g} epochs has "
            f"({'the training data has no length' if batches == math.inf else 'manual optimisation'}): set "
            "`warmup_steps`."
        )
    return round(epochs * math.ceil(batches / accumulated)) if epochs else 0
