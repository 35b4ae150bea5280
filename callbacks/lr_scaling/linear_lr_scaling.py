"""The callback that fits the learning rate to the batch size."""

from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commopt.callbacks.lr_scaling.groups import unscale
from lightning_commopt.callbacks.lr_scaling.guard import OscillationGuard
from lightning_commopt.callbacks.lr_scaling.options import LRScalingOptions, OnOscillation, Rule, Schedule
from lightning_commopt.callbacks.lr_scaling.report import announce
from lightning_commopt.callbacks.lr_scaling.scaler import LRScaler

__all__ = ["LinearLRScaling"]


class LinearLRScaling(Callback):
    """Scale learning rates with the effective batch size, after a gradual warm-up.

    ``configure_optimizers`` keeps the learning rates, and the schedule, that were tuned at ``base_batch_size``. In any
    run the rate in use is ``what the schedule gives x scale``, where ``scale`` grows linearly during the warm-up and
    then stays at ``factor = effective batch / base_batch_size``, or its square root. The effective batch is the batch
    of one device x data-parallel ranks x ``accumulate_grad_batches``; with manual optimisation, which accumulates by
    itself, say what one device contributes to a step in ``batch_size_per_device``.

    Sources: linear scaling and gradual warm-up from the base rate over 5 epochs, for SGD: Goyal et al., "Accurate,
    Large Minibatch SGD", 2017, https://arxiv.org/abs/1706.02677, sections 2.1 and 2.2. Square root: Krizhevsky, "One
    weird trick for parallelizing convolutional neural networks", 2014, https://arxiv.org/abs/1404.5997, section 5; for
    Adam and other adaptive optimizers Granziol et al., 2020, https://arxiv.org/abs/2006.09092, and Malladi et al.,
    2022, https://arxiv.org/abs/2205.10287.

    **Warm-up** counts steps that were applied: one that a gradient scaler, DeepSpeed or the strategy skipped on any
    rank does not count. Each optimizer has its own count. After a warm-up of N steps, step N + 1 is the first with the
    peak rate.

    **Schedulers** of ``configure_optimizers`` advance as always, and see and write unscaled rates, so that any kind
    works, with all its absolute values (``eta_min``, ``max_lr``) meant for the base batch; its ``get_last_lr()`` is
    unscaled, too. Elsewhere ``param_group["lr"]`` is the rate in use: ``LearningRateMonitor`` shows that. Groups that
    are added later are scaled as well. Other code that writes a rate sets what is scaled; a warning tells so.

    **Checkpoints** keep both rates in each parameter group (``lr`` and ``unscaled_lr``), so that nothing is scaled
    twice. A run resumed with another effective batch continues the warm-up with the new factor; without this callback
    it goes on with the rate it had.

    **Learning rate finders** measure unscaled rates with the batch of this run: set ``base_batch_size`` to this run's
    effective batch when you use what they suggest.

    Args:
        base_batch_size: The effective batch size for which the learning rates were tuned.
        rule: ``"linear"``: the rate is multiplied by ``effective batch / base_batch_size``. ``"sqrt"``: by its root.
        warmup_steps: Applied optimizer steps until the peak is reached; 0 for no warm-up.
        warmup_epochs: The same in epochs, where the number of batches in one is known. At most one of the two; if
            neither is given, 5 epochs.
        schedule: What follows the warm-up. None: your own scheduler, if there is one. ``"constant"``: the peak rate.
            ``"cosine"``: half a cosine down to ``min_factor``. The last two refuse to run beside a scheduler.
        start_factor: Where the warm-up begins, as a part (0 to 1) of the peak rate. None: at the unscaled rate, or at
            the peak where that is lower.
        min_factor: Where the cosine ends, as a part (0 to 1) of the peak rate.
        total_steps: Applied steps, warm-up included, at the end of the cosine. None: all steps of the fit.
        batch_size_per_device: Samples of one batch on one device. None: what the training DataLoader says.
        on_oscillation: What to do when the mean loss over ranks, watched in windows of ten optimizer steps, swings
            without falling or rises far above its best. ``"warn"``: say so, with advice. ``"reduce"``: halve the rate,
            on all ranks at the same step, again if need be, and at most down to the base rate; checkpoints keep it.
            ``"off"``: nothing is watched. Watching costs one small all-reduce in ten steps.

    Raises:
        ValueError: An option is out of its bounds or cannot be honoured; the message says what to do instead.

    Attributes:
        effective_batch_size: Samples of an optimizer step in the last fit; None before its training began.
        factor: What rates are multiplied by at the peak; None before.

    """

    _applied: ClassVar[WeakKeyDictionary[Optimizer, int]] = WeakKeyDictionary()
    """Applied steps of every optimizer whose rates are scaled now, running or left so by a fit that has ended."""

    def __init__(
        self,
        base_batch_size: int,
        rule: Rule = "linear",
        *,
        warmup_steps: int | None = None,
        warmup_epochs: float | None = None,
        schedule: Schedule | None = None,
        start_factor: float | None = None,
        min_factor: float = 0.0,
        total_steps: int | None = None,
        batch_size_per_device: int | None = None,
        on_oscillation: OnOscillation = "off",
    ) -> None:
        self.options = LRScalingOptions(
            base_batch_size=base_batch_size,
            rule=rule,
            warmup_steps=warmup_steps,
            warmup_epochs=warmup_epochs,
            schedule=schedule,
            start_factor=start_factor,
            min_factor=min_factor,
            total_steps=total_steps,
            batch_size_per_device=batch_size_per_device,
            on_oscillation=on_oscillation,
        )
        self.effective_batch_size: float | None = None
        self.factor: float | None = None
        self._scaler: LRScaler | None = None
        self._guard: OscillationGuard | None = None
        self._state: dict[str, Any] = {}

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if stage != "fit":
            return
        self._close()
        self._state = {}
        for optimizer in self._applied:  # `configure_optimizers` may return it again, with a new scheduler
            unscale(optimizer)

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._applied.update(zip(trainer.optimizers, self._state.get("applied_steps", ()), strict=False))
        self._scaler = LRScaler(trainer, self.options, self._applied)
        self._note_batch(self._scaler)
        announce(self._scaler, self.options, self._state.get("effective_batch_size"))
        if self.options.on_oscillation != "off":
            reduce = self.options.on_oscillation == "reduce"
            self._guard = OscillationGuard(self._scaler, reduce, self._state.get("on_oscillation", {}))

    @override
    def on_train_batch_start(self, *args: Any) -> None:
        if self._scaler is not None:
            self._scaler.find_schedulers()

    @override
    def on_before_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer
    ) -> None:
        if self._scaler is not None:
            self._scaler.about_to_step(optimizer)
            self._note_batch(self._scaler)

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._guard is not None:
            self._guard.batch_done(outputs)

    @override
    def on_save_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        if self._guard is not None and not trainer.interrupted:  # then other ranks may be gone
            self._guard.settle()
            checkpoint["callbacks"][self.state_key] = self.state_dict()

    @override
    def on_train_end(self, *args: Any) -> None:
        if self._scaler is not None:
            self._scaler.end_training()

    @override
    def on_exception(self, *args: Any) -> None:
        self._close()

    @override
    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        self._close()

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._scaler is None:
            return self._state
        state = {"applied_steps": self._scaler.applied_steps, "effective_batch_size": self.effective_batch_size}
        return state if self._guard is None else {**state, "on_oscillation": self._guard.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = dict(state_dict)

    def _note_batch(self, scaler: LRScaler) -> None:
        """Show what is in force."""
        self.effective_batch_size, self.factor = scaler.batch.size, scaler.factor

    def _close(self) -> None:
        """End the scaling of a fit; its state can still be saved."""
        if self._scaler is not None:
            self._state = self.state_dict()
            self._scaler.close()
            self._scaler = self._guard = None
