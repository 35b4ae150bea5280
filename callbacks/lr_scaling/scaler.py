"""The scaling of learning rates in one fit."""

from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.callbacks import BaseFinetuning
from torch.optim import Optimizer

from lightning_commopt.callbacks.lr_scaling.effective_batch import effective_batch
from lightning_commopt.callbacks.lr_scaling.groups import ScheduleSteps, rescale, schedule_lr, unscaled
from lightning_commopt.callbacks.lr_scaling.options import LRScalingOptions
from lightning_commopt.callbacks.lr_scaling.ramp import ramp_for
from lightning_commopt.callbacks.lr_scaling.step_verdict import StepVerdict
from lightning_commopt.callbacks.monitor.wrapped import WrappedMethods

__all__ = ["LRScaler"]


class LRScaler:
    """Keeps every learning rate at the schedule's value times the scale, from its making until :meth:`close`.

    Made on all ranks at once.

    Args:
        trainer: About to train; optimizers and schedulers are restored.
        options: What was asked for.
        applied: Applied steps of each optimizer so far; counted on here.

    Raises:
        ValueError: What was asked for cannot be done in this fit.

    """

    def __init__(
        self, trainer: "pl.Trainer", options: LRScalingOptions, applied: MutableMapping[Optimizer, int]
    ) -> None:
        _check(trainer, options)
        self.trainer = trainer
        self.batch = effective_batch(trainer, options.batch_size_per_device)
        self.ramp = trainer.strategy.broadcast(ramp_for(trainer, options, self.batch.accumulated))
        self.reduction = 1.0
        self._options = options
        self._applied = applied
        self._stepping: Optimizer | None = None
        self._warned = False
        self._verdict = StepVerdict(trainer)
        self._wrapped = WrappedMethods()
        self._wrapped.wrap(trainer.strategy, "optimizer_step", self._step)
        for callback in trainer.callbacks:
            if isinstance(callback, BaseFinetuning):
                self._wrapped.wrap(callback, "finetune_function", self._unscaled)
        self._schedules = ScheduleSteps()
        self.find_schedulers()
        self._rescale_all()

    @property
    def factor(self) -> float:
        """What the learning rate is multiplied by at the peak."""
        return self._options.factor(self.batch.size)

    @property
    def applied_steps(self) -> list[int]:
        """Applied steps of each optimizer."""
        return [self._applied.get(optimizer, 0) for optimizer in self.trainer.optimizers]

    def base_rates(self) -> list[float]:
        """Return the different unscaled rates from which schedules begin, in the order of groups."""
        groups = [group for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        return list(dict.fromkeys(float(group.get("initial_lr", schedule_lr(group))) for group in groups))

    def find_schedulers(self) -> None:
        """Watch the schedulers that the fit has now; some callbacks exchange them."""
        for config in self.trainer.lr_scheduler_configs:
            self._schedules.wrap(config.scheduler)

    def about_to_step(self, optimizer: Optimizer) -> None:
        """Set the rates for a step: other code may have written to them, or changed the accumulation."""
        accumulated = self.trainer.accumulate_grad_batches
        if accumulated != self.batch.accumulated:
            self.batch = self.batch.accumulating(accumulated)
            rank_zero_info(f"`LinearLRScaling`: effective batch {self.batch} from now on, scale {self.factor:g}.")
            self._rescale_all()
        self._rescale(optimizer)
        self._stepping = optimizer

    def reduce_to(self, reduction: float) -> None:
        """Let all rates be that part of what the ramp gives, from now on."""
        self.reduction = reduction
        self._rescale_all()

    def end_training(self) -> None:
        """Stop counting steps."""
        self._verdict.close()

    def close(self) -> None:
        """Give everything back that was wrapped; rates stay as they are."""
        self._verdict.close()
        self._wrapped.restore()
        self._schedules.restore()

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Around an optimizer step: set the rates of the next one."""
        self._stepping = None
        yield
        if (optimizer := self._stepping) is None:  # skipped by the strategy, or a step of the LR finder
            return
        before = self._applied.get(optimizer, 0)
        # the verdict waits for the device: it is not asked for once nothing depends on it
        applied = self._verdict.applied(optimizer) if self.ramp.moves(before) else True
        self._applied[optimizer] = before + applied
        self._rescale(optimizer)

    @contextmanager
    def _unscaled(self) -> Iterator[None]:
        """Show unscaled rates of all optimizers."""
        with ExitStack() as stack:
            for optimizer in self.trainer.optimizers:
                stack.enter_context(unscaled(optimizer))
            yield
        self._rescale_all()

    def _rescale_all(self) -> None:
        for optimizer in self.trainer.optimizers:
            self._rescale(optimizer)

    def _rescale(self, optimizer: Optimizer) -> None:
        """Bring an optimizer's rates to where the ramp is."""
        scale = self.reduction * self.ramp.scale(self._applied.setdefault(optimizer, 0), self.factor)
        written = rescale(optimizer, scale)
        if written and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"Other code set the learning rate of a parameter group to {written[0]:g}. `LinearLRScaling` takes it "
                "as meant for the base batch and scales it. If it was computed from the scaled rate, it is now scaled "
                "twice: use a scheduler that `configure_optimizers` returns, instead."
            )


def _check(trainer: "pl.Trainer", options: LRScalingOptions) -> None:
    """Refuse what does not go together."""
    if options.schedule is not None and trainer.lr_scheduler_configs:
        raise ValueError(
            f"`LinearLRScaling(schedule={options.schedule!r})` and the scheduler "
            f"`{type(trainer.lr_scheduler_configs[0].scheduler).__name__}` of `configure_optimizers` would both set "
            "the learning rate: remove one of them. With `schedule=None` the callback scales what yours gives."
        )
    for optimizer in trainer.optimizers:
        if any(group.get("lr") is None for group in optimizer.param_groups):
            raise ValueError(
                f"`LinearLRScaling` needs an `lr` in every parameter group of `{type(optimizer).__name__}`: set one, "
                "or remove the callback."
            )
