"""The callback that measures a fit and says what it came to."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.callbacks import Callback, RichProgressBar
from typing_extensions import override

from lightning_commopt.callbacks.monitor.advice import advise
from lightning_commopt.callbacks.monitor.averages import StepAverages
from lightning_commopt.callbacks.monitor.end_table import print_table
from lightning_commopt.callbacks.monitor.fit_measurement import FitMeasurement
from lightning_commopt.callbacks.monitor.sources import is_measurable, source_for
from lightning_commopt.callbacks.monitor.summary import CommSummary
from lightning_commopt.callbacks.report import ReportRecording, check_can_report

__all__ = ["CommMonitor"]


class CommMonitor(Callback):
    """Measure how much of a fit is computing, communicating and waiting; log it, and print a table at the end.

    Works under :class:`~lightning_commopt.CommOptStrategy` with any method, and under Lightning's own
    :class:`~lightning.pytorch.strategies.DDPStrategy`, to compare with. With one process there is time and throughput
    to tell. Under :class:`~lightning_commopt.CommOptShardedStrategy` communication is that of replicas: what FSDP2
    gathers and reduces inside a node counts as compute, and its bytes apart. Under
    :class:`~lightning_commopt.CommOptDeepSpeedStrategy` it is that of gradients; of ``"zero++"`` nothing is known.
    Under another strategy it warns and does nothing.

    Every ``every_n_steps`` optimizer steps the Trainer's loggers get the averages of the steps since the last time,
    over all ranks, each under ``commopt/``:

    ================================= ============ ====================================================================
    key                               unit         meaning
    ================================= ============ ====================================================================
    ``samples_per_s``                 samples/s    samples of all ranks together
    ``samples_per_s_per_rank``        samples/s    of one rank, on average
    ``step_ms``                       ms           wall time of an optimizer step with all its accumulated batches,
                                                   without validation and checkpoints; the sum of the next three
    ``compute_ms``                    ms           the rest after communication and waiting: forward, backward,
                                                   optimizer, data loading, logging
    ``exposed_comm_ms``               ms           backward had nothing left to compute, and gradients still travelled
    ``waiting_ms``                    ms           waiting for a slower rank: in the gradient exchange, and, where no
                                                   method is in force, in the broadcast that Lightning does before
                                                   every batch
    ``transfer_ms``                   ms           gradients were on their way, hidden or not; waiting left out
    ``comm_ratio``                    0 to 1       ``exposed_comm_ms / step_ms``
    ``waiting_ratio``                 0 to 1       ``waiting_ms / step_ms``
    ``overlap_ratio``                 0 to 1       part of the exchange that was hidden behind backward
    ``scaling_efficiency``            0 to 1       ``compute_ms / step_ms``: throughput over that of as many ranks that
                                                   need not talk to each other
    ``slowest_rank``                  rank         the one that computes longest
    ``sent_mb_per_step``              MB (1e6 B)   gradients that one rank sends; the sum of the next four
    ``sent_payload_mb_per_step``      MB           encoded gradients
    ``sent_exact_mb_per_step``        MB           gradients that travel exactly
    ``sent_header_mb_per_step``       MB           flags and padding
    ``sent_inside_node_mb_per_step``  MB           inside a node; under sharding, parameters too
    ``compression_ratio``             -            bytes of plain DDP over bytes sent, those inside a node left out
    ``compression_error``             -            largest ``||residual|| / ||input||`` of a bucket, when last sampled
    ``gpu_busy_ratio``                0 to 1       NVML's utilisation of the ranks' GPUs, sampled
    ``gpu_memory_mb``                 MB           in use on the fullest GPU, by all processes
    ``gpu_pcie_mb_per_s``             MB/s         over PCIe in both directions, a GPU, sampled
    ``gpu_nvlink_mb_per_step``        MB           over a GPU's NVLinks in both directions, whoever sends
    ``cpu_busy_cores``                cores        processor time of a rank's process over the time of its steps, mean
    ``host_network_sent_mb_per_step`` MB           through all network cards of rank 0's *whole host*, whoever sends;
                                                   ``host_network_received_mb_per_step`` likewise
    ================================= ============ ====================================================================

    A key is left out where nothing was measured (the error under a method that samples none, samples of batches whose
    tensors differ in their first dimension, GPUs where there are none or ``nvidia-ml-py`` is not installed). The first
    three steps of a fit, and of a method that ``auto`` has changed to, are warm-up and not counted; the table is that
    of the last method. Ranks talk to each other at the end of the warm-up, of an interval and of the fit, never in
    between.

    After the first interval and at the end of the fit, rank 0 says what bounds the run, and what each remedy is
    predicted to gain (:func:`~lightning_commopt.callbacks.monitor.advice.advise`).

    After the fit :attr:`summary` holds the numbers of the table on every rank (not in the main process of ``spawn``
    or ``fork``, which is none).

    Args:
        every_n_steps: Optimizer steps between two logs. None: the Trainer's ``log_every_n_steps``.
        table: Whether rank 0 prints the table at the end.
        report: File that rank 0 writes at the end: one HTML page with what bounds the run, the split of its steps, a
            time line of a few of them, bytes, error, loss and every number of :attr:`summary`. Beside it comes the same
            as JSON (``report.json`` beside ``report.html``), which ``commopt report`` and ``commopt plan`` read. The
            page needs ``pip install 'lightning-commopt[report]'``; a name that ends in ``.json`` writes the JSON alone
            and needs nothing. None: no report.
        exact: Time by hand: before every batch ranks wait for each other, and their devices are synchronised there,
            around backward and after the step, so that every piece of a step has its own time. Slower; without it
            nothing is waited for, and on a GPU the pieces are those of the host's queue.

    Raises:
        ValueError: ``every_n_steps`` is below 1, or ``report`` is a folder.
        ModuleNotFoundError: What ``report`` needs is not installed.

    Attributes:
        summary: What the last fit came to; None before its end, and after a fit that failed.

    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        table: bool = True,
        report: str | Path | None = None,
        *,
        exact: bool = False,
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(
                f"`every_n_steps` must be at least 1 (or None for the Trainer's own), got {every_n_steps}."
            )
        self.every_n_steps = every_n_steps
        self.table = table
        self.exact = exact
        self._advised = False
        self.report = None if report is None else Path(report)
        if self.report is not None:
            check_can_report(self.report)
        self.summary: CommSummary | None = None
        self._fit: FitMeasurement | None = None
        self._recording: ReportRecording | None = None

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if stage != "fit":
            return
        self._drop()
        self.summary = self._recording = None
        self._advised = False
        if not is_measurable(trainer):
            rank_zero_warn(
                f"`CommMonitor` cannot measure `{type(trainer.strategy).__name__}` and is not active in this fit. It "
                "measures `CommOptStrategy`, `CommOptShardedStrategy`, `CommOptDeepSpeedStrategy` but for ZeRO++, and "
                "`DDPStrategy`: use `strategy='commopt'`, `'commopt_hsdp'`, `'commopt_deepspeed'` or `'ddp'`."
            )
        elif trainer.world_size == 1:
            rank_zero_info("`CommMonitor`: one process has nothing to exchange; only time and throughput are measured.")

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        if is_measurable(trainer):
            every_n_steps = self.every_n_steps or trainer.log_every_n_steps
            self._fit = FitMeasurement(trainer, source_for(trainer), every_n_steps, self.exact)
            if self.report is not None:
                self._recording = ReportRecording(self.report, trainer, self._fit)

    @override
    def on_train_batch_start(self, *args: Any) -> None:
        if self._fit is not None:
            self._fit.batch_begins()
        self._note("between")

    @override
    def on_before_backward(self, *args: Any) -> None:
        if self._fit is not None:
            self._fit.synchronize()
        self._note("forward")

    @override
    def on_after_backward(self, *args: Any) -> None:
        if self._fit is not None:
            self._fit.synchronize()
            self._fit.source.note_backward()
        self._note("backward")

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._note("optimizer")
        if self._fit is None:
            return
        averages = self._fit.batch_done(batch)
        if averages is not None:
            _log(trainer, averages)
            if not self._advised:
                self._advised = True
                method = self._fit.source.method
                advice = advise(averages, method, self._fit.source.situation())
                rank_zero_info(f"CommMonitor, after {trainer.global_step} steps: {advice.sentence}")
        if self._recording is not None:
            self._recording.batch_done(outputs, averages)

    @override
    def on_validation_start(self, *args: Any) -> None:
        if self._fit is not None:
            self._fit.clock.pause()  # until the next training batch begins

    @override
    def on_train_end(self, *args: Any) -> None:
        if self._fit is not None:
            self.summary = self._fit.finish()
            if self._recording is not None:
                self._recording.finish(self.summary)
            self._fit.source.close()
            self._drop()

    @override
    def on_exception(self, *args: Any) -> None:
        self._drop()

    @override
    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        self._drop()
        if stage == "fit" and self.summary is not None and self.table and trainer.is_global_zero:
            bar = trainer.progress_bar_callback
            if isinstance(bar, RichProgressBar):
                bar.teardown(trainer, pl_module, stage)  # it would draw below the table; a second call does nothing
            print_table(self.summary)
        if self._recording is not None:
            self._recording.write()
            self._recording = None

    def _note(self, phase: str) -> None:
        """End a piece of the training loop for the time line."""
        if self._recording is not None:
            self._recording.steps.note(phase)

    def _drop(self) -> None:
        """Forget the running measurement."""
        if self._fit is not None:
            self._fit.restore()
            self._fit = None


def _log(trainer: "pl.Trainer", averages: StepAverages) -> None:
    """Hand averages to the loggers."""
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics(averages.metrics(), step=trainer.global_step)
