"""The callback that looks for what is wrong with a distributed fit."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.seed import isolate_rng
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commopt.callbacks.doctor.check import Check, Run
from lightning_commopt.callbacks.doctor.collectives import CollectiveCheck
from lightning_commopt.callbacks.doctor.data import DataCheck
from lightning_commopt.callbacks.doctor.environment import EnvironmentCheck
from lightning_commopt.callbacks.doctor.finding import Finding
from lightning_commopt.callbacks.doctor.gradients import GradientCheck
from lightning_commopt.callbacks.doctor.loss import LossCheck
from lightning_commopt.callbacks.doctor.options import DoctorOptions
from lightning_commopt.callbacks.doctor.reference import ReferenceCheck
from lightning_commopt.callbacks.doctor.seeds import SeedCheck
from lightning_commopt.callbacks.doctor.synchronisation import SynchronisationCheck
from lightning_commopt.callbacks.doctor.table import report
from lightning_commopt.callbacks.monitor.views import view_for
from lightning_commopt.callbacks.monitor.wrapped import WrappedMethods

__all__ = ["CHECKS", "DistributedDoctor"]

CHECKS: tuple[type[Check], ...] = (
    DataCheck,
    SeedCheck,
    GradientCheck,
    SynchronisationCheck,
    CollectiveCheck,
    ReferenceCheck,
    LossCheck,
    EnvironmentCheck,
)


class DistributedDoctor(Callback):
    """Look for the usual faults of a distributed fit, say where they are, and what to do.

    Works under :class:`~lightning_commopt.CommOptStrategy` and Lightning's own
    :class:`~lightning.pytorch.strategies.DDPStrategy`, and under :class:`~lightning_commopt.CommOptShardedStrategy` and
    :class:`~lightning_commopt.CommOptDeepSpeedStrategy`, where it says what it cannot see because it is in parts. With
    one process it says what cannot be checked. It prints a table after the first ``steps`` optimizer steps, and another
    at the end of the fit, and changes nothing: neither parameters nor random numbers nor the order of the data. Nothing
    is raised; the numbers are in :attr:`findings`.

    =================== ===============================================================================================
    check               looks for
    =================== ===============================================================================================
    ``data``            different numbers of batches or samples, repeats by the sampler, samplers that do not share
                        samples out, two ranks with the same data
    ``seeds``           initial parameters and buffers that are not equal (before they are made so); random streams
                        that are (dropout, augmentation)
    ``gradients``       NaN and infinity, with the parameter; parameters without a gradient; a rank whose gradient is 0
                        or far larger than the others', before the exchange
    ``synchronisation`` parameters that drift apart, with the first step at which it shows
    ``collectives``     collectives that a step could do without, by call site (``self.log(sync_dist=True)``, buffers,
                        ``find_unused_parameters``, barriers)
    ``reference``       a loss other than that of one process that trains on the batches of all ranks
    ``loss``            oscillation and divergence
    ``environment``     backend, interface, NCCL's variables and transport, shared memory, speed of the links
    =================== ===============================================================================================

    Costs: in the first ``steps`` steps, hashes of a few batches and a norm for each gradient; at their end some
    messages between ranks; from then on a hash of the parameters every ``hash_every_n_steps`` steps. A reference keeps
    the batches of its steps in host memory, and a copy of module and optimizer on the device.

    Args:
        steps: Optimizer steps to look at.
        reference_steps: Optimizer steps to repeat in one process, for the check ``reference``; 0 for none.
        reference_tolerance: Difference of the two losses, as a part of them, that is no finding. Compressed gradients
            change the loss a little.
        hash_every_n_steps: Optimizer steps between two comparisons of the parameters.
        probe_seconds: Limit for the test of the links (at most 5); 0 for none.

    Raises:
        ValueError: An option is out of its bounds.

    Attributes:
        findings: What was found in the last fit, the same on every rank (not in the main process of ``spawn`` or
            ``fork``, which is none).

    """

    examines_run: ClassVar[bool] = True
    """Tells :class:`~lightning_commopt.callbacks.CommMonitor` that the table takes time which is not training's."""

    def __init__(
        self,
        steps: int = 20,
        *,
        reference_steps: int = 0,
        reference_tolerance: float = 0.05,
        hash_every_n_steps: int = 10,
        probe_seconds: float = 2.0,
    ) -> None:
        self.options = DoctorOptions(
            steps=steps,
            reference_steps=reference_steps,
            reference_tolerance=reference_tolerance,
            hash_every_n_steps=hash_every_n_steps,
            probe_seconds=probe_seconds,
        )
        self.findings: list[Finding] = []
        self._run: Run | None = None
        self._checks: list[Check] = []
        self._answers: dict[str, list[Finding]] = {}
        self._global_step = 0
        self._looking = False
        self._wrapped = WrappedMethods()

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if stage != "fit":
            return
        self._drop()
        self.findings, self._answers = [], {}
        view = view_for(trainer)
        if view is None:
            rank_zero_warn(
                f"`DistributedDoctor` does not know `{type(trainer.strategy).__name__}` and is not active in this fit. "
                "It looks at `CommOptStrategy`, `CommOptShardedStrategy`, `CommOptDeepSpeedStrategy` and `DDPStrategy`."
            )
            return
        self._run = Run(trainer, view, self.options)
        self._checks = [check(self._run) for check in CHECKS]
        if self._run.world > 1:
            self._wrapped.wrap(trainer.strategy, view.begins_alike, self._before_wrapping)

    @contextmanager
    def _before_wrapping(self) -> Iterator[None]:
        """See the module before ranks are made equal; DDP may wrap again later."""
        if not self._looking:
            with isolate_rng():
                for check in self._checks:
                    check.before_wrapping()
        yield

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._wrapped.restore()
        self._global_step = trainer.global_step
        self._looking = self._run is not None
        for check in self._checks:
            check.train_start()

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        for check in self._active():
            check.batch_start(batch, batch_idx)

    @override
    def on_after_backward(self, *args: Any) -> None:
        for check in self._active():
            check.after_backward()

    @override
    def on_before_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer
    ) -> None:
        for check in self._active():
            check.before_optimizer_step(optimizer)

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._run is None:
            return
        steps, self._global_step = trainer.global_step - self._global_step, trainer.global_step
        self._run.steps_done += steps
        for check in self._active():
            check.batch_end(outputs, steps)
        if self._looking and self._run.steps_done >= self.options.window:
            self._ask(f"first {self._run.steps_done} steps")
            self._looking = False

    @override
    def on_train_epoch_end(self, *args: Any) -> None:
        for check in self._active():
            check.interrupted()

    @override
    def on_validation_start(self, *args: Any) -> None:
        for check in self._active():
            check.interrupted()

    @override
    def on_train_end(self, *args: Any) -> None:
        if self._run is not None:
            self._ask(f"whole fit of {self._run.steps_done} steps")
            self._drop()

    @override
    def on_exception(self, *args: Any) -> None:
        self._drop()

    @override
    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        self._drop()

    def _active(self) -> list[Check]:
        """The checks that still look."""
        return [check for check in self._checks if self._looking or check.lasting]

    def _ask(self, when: str) -> None:
        """Let all checks that look say what they saw, and print everything. A collective."""
        assert self._run is not None
        with isolate_rng():
            for check in self._active():
                self._answers[check.name] = check.findings()
                if not check.lasting:
                    check.close()
        self.findings = [finding for answers in self._answers.values() for finding in answers]
        self.findings.sort(key=lambda finding: [check.name for check in CHECKS].index(finding.check))
        if self._run.trainer.is_global_zero:
            world = self._run.world
            self._show(f"{when} on {world} rank{'s' * (world > 1)}")

    def _show(self, when: str) -> None:
        """Print everything, on rank 0."""
        print(report(self.findings, when))

    def _drop(self) -> None:
        """Leave no trace."""
        self._wrapped.restore()
        for check in self._checks:
            check.close()
        if self._run is not None:
            self._run.close()
        self._run, self._checks, self._looking = None, [], False
