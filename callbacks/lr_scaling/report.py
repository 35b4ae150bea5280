"""What the scaling of learning rates says when a fit begins."""

from collections.abc import Iterator

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_commopt.callbacks.lr_scaling.options import LRScalingOptions
from lightning_commopt.callbacks.lr_scaling.ramp import steps_of_fit
from lightning_commopt.callbacks.lr_scaling.scaler import LRScaler

__all__ = ["announce"]

_ADVISE_CLIPPING_ABOVE = 8


def announce(scaler: LRScaler, options: LRScalingOptions, batch_size_before: float | None) -> None:
    """Say in one line what will happen, and in one more each what is special about it.

    Args:
        scaler: Of the fit that begins.
        options: What was asked for.
        batch_size_before: Effective batch size of the run whose checkpoint is resumed.

    """
    for line in (_summary(scaler, options), *_notes(scaler, options, batch_size_before)):
        rank_zero_info(f"`LinearLRScaling`: {line}")
    if any(isinstance(callback, LearningRateFinder) for callback in scaler.trainer.callbacks):
        rank_zero_warn(
            "`LearningRateFinder` suggests a learning rate for the batch of this run, and `LinearLRScaling` scales it "
            f"as one for a batch of {options.base_batch_size}: use one of them, or set `base_batch_size` to "
            f"{scaler.batch.size:g}."
        )


def _summary(scaler: LRScaler, options: LRScalingOptions) -> str:
    """From what, to what, when."""
    factor, steps, done = scaler.factor, scaler.ramp.warmup_steps, min(scaler.applied_steps)
    rates = ", ".join(f"{rate:g} -> {rate * factor:g}" for rate in scaler.base_rates())
    when = f"after {steps} applied steps" if steps else "at once"
    so_far = f" ({done} done)" if done else ""
    return (
        f"batch {options.base_batch_size} -> {scaler.batch}, learning rate x {factor:g} ({options.rule}): {rates}, "
        f"reached {when}{so_far}."
    )


def _notes(scaler: LRScaler, options: LRScalingOptions, batch_size_before: float | None) -> Iterator[str]:
    """What the user may not expect."""
    trainer, factor, size = scaler.trainer, scaler.factor, scaler.batch.size
    if batch_size_before is not None and batch_size_before != size:
        before = options.factor(batch_size_before)
        yield (
            f"the checkpoint was written with an effective batch of {batch_size_before:g}; this run has {size:g}, and "
            f"its peak is {factor:g} times the base rate, not {before:g} times."
        )
    steps = steps_of_fit(trainer)
    if steps is not None and steps < scaler.ramp.warmup_steps:
        yield f"the fit ends after {steps} optimizer steps, before its warm-up does."
    if factor > _ADVISE_CLIPPING_ABOVE and not _clips(trainer):
        yield (
            f"no `gradient_clip_val` is set; a learning rate x {factor:g} is less likely to diverge with one, for "
            "example 1.0."
        )


def _clips(trainer: "pl.Trainer") -> bool:
    """Whether gradients are clipped, or may be, where the module does it itself."""
    module = trainer.lightning_module
    own = not module.automatic_optimization or is_overridden("configure_gradient_clipping", module)
    return own or bool(trainer.gradient_clip_val)
