"""Collects during a fit what its report will tell."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_commopt.callbacks.monitor.averages import WARM_UP_STEPS, StepAverages
from lightning_commopt.callbacks.monitor.fit_measurement import FitMeasurement
from lightning_commopt.callbacks.monitor.summary import CommSummary
from lightning_commopt.callbacks.report.content import Measured, RecordedSteps, ReportContent
from lightning_commopt.callbacks.report.environment import environment, place_of
from lightning_commopt.callbacks.report.history import History, Interval
from lightning_commopt.callbacks.report.page import write
from lightning_commopt.callbacks.report.step_recorder import StepRecorder
from lightning_commopt.callbacks.report.traffic import by_group, by_kind
from lightning_commopt.measure import aligned, clock_for

__all__ = ["ReportRecording"]


class ReportRecording:
    """One fit's history and time line; ranks talk to each other only in :meth:`finish`.

    Args:
        path: Where rank 0 writes the report.
        trainer: About to train.
        fit: The measurement whose intervals are kept.

    """

    def __init__(self, path: Path, trainer: "pl.Trainer", fit: FitMeasurement) -> None:
        self.path = path
        self._trainer, self._fit = trainer, fit
        self.steps = StepRecorder(clock_for(trainer.strategy.root_device), fit.source.record)
        self._method = fit.source.method
        self._history = History()
        self._interval_start = trainer.global_step
        self._global_step = trainer.global_step
        self._losses: Tensor | None = None
        self._batches = 0
        self._content: ReportContent | None = None

    def batch_done(self, outputs: Any, averages: StepAverages | None) -> None:
        """Take note of a batch, after the measurement has.

        Args:
            outputs: What ``training_step`` returned.
            averages: Those of the interval that the measurement has just ended.

        """
        self._add_loss(outputs)
        if self._trainer.global_step == self._global_step:
            return
        self._global_step = self._trainer.global_step
        if self._fit.source.method != self._method:
            self._method = self._fit.source.method
            self.steps.begin_anew()
        if self._fit.clock.closed.steps >= WARM_UP_STEPS:
            self.steps.step_done(self._global_step)
        if averages is not None:
            self._end_interval(averages)
            self.steps.record_again()

    def finish(self, summary: CommSummary) -> None:
        """Gather what other ranks recorded. A collective, on all ranks."""
        self.steps.close()
        ranks = self._fit.source.all_gather((self.steps.recorded(), place_of(self._trainer)))
        if not self._trainer.is_global_zero:
            return
        if self._fit.rest.measured_steps:
            self._end_interval(self._fit.rest)
        strategy = self._trainer.strategy
        kinds = by_kind(*self._fit.measured)
        parameters = {name: p for name, p in self._trainer.lightning_module.named_parameters() if p.requires_grad}
        path = getattr(strategy, "_path", None)
        groups = by_group(parameters, path and path.method, kinds, summary.dense_mb_per_step or 0.0) if kinds else []
        self._content = ReportContent(
            summary=summary,
            intervals=tuple(self._history.intervals),
            recorded=_together([recorded for recorded, _ in ranks]),
            kinds=tuple(kinds.items()),
            groups=tuple(groups),
            explanation=strategy.explain() if hasattr(strategy, "explain") else "",
            decisions=tuple(getattr(strategy, "decisions", ())),
            environment=tuple(environment(self._trainer, [place for _, place in ranks])),
            measured=self._measured(summary),
        )

    def write(self) -> None:
        """Write the report where there is one, on rank 0. What goes wrong here does not spoil a finished fit."""
        if self._content is None:
            return
        try:
            write(self.path, self._content)
        except Exception as error:
            rank_zero_warn(f"`CommMonitor` could not write its report: {type(error).__name__}: {error}")
        else:
            rank_zero_info(f"CommMonitor: the report is in {self.path.resolve()}")

    def _measured(self, summary: CommSummary) -> Measured:
        """Return what there is for predictions, besides the summary."""
        parameters = [p for p in self._trainer.lightning_module.parameters() if p.requires_grad]
        rate, step_ms = summary.samples_per_s_per_rank, summary.step_ms
        auto = getattr(self._trainer.strategy, "_auto", None)
        measurements = None if auto is None or auto.tuner is None else auto.tuner.measurements
        return Measured(
            numels=tuple(p.numel() for p in parameters),
            gradient_bytes=sum(p.nbytes for p in parameters),
            samples=None if rate is None or step_ms is None else rate * step_ms * 1e-3,
            link=None if measurements is None else measurements.link,
            profile=None if measurements is None else measurements.compute,
            codecs=() if measurements is None else tuple(measurements.codecs.items()),
        )

    def _add_loss(self, outputs: Any) -> None:
        """Add up losses where they are; nobody waits for the device. Lightning has divided by the batches of a step."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            value = loss.detach().to(torch.float32).reshape(()) * self._trainer.accumulate_grad_batches
            self._losses = value if self._losses is None else self._losses + value
            self._batches += 1

    def _end_interval(self, averages: StepAverages) -> None:
        """Keep the averages of the steps since the last interval."""
        optimizers = self._trainer.optimizers
        self._history.add(
            Interval(
                first_step=self._interval_start + 1,
                last_step=self._global_step,
                compute_ms=averages.compute_ms,
                exposed_comm_ms=averages.exposed_comm_ms,
                waiting_ms=averages.waiting_ms,
                compression_error=averages.compression_error,
                loss=None if self._losses is None else float(self._losses) / self._batches,
                learning_rate=float(optimizers[0].param_groups[0]["lr"]) if optimizers else None,
            )
        )
        self._interval_start, self._losses, self._batches = self._global_step, None, 0


def _together(ranks: list[RecordedSteps | None]) -> RecordedSteps | None:
    """Put the recordings of all ranks on one clock; None where one is missing."""
    present = [rank for rank in ranks if rank is not None]
    if len(present) < max(2, len(ranks)):
        return None
    spans = aligned([rank.ranks[0] for rank in present])
    return RecordedSteps(present[0].first_step, tuple(map(tuple, spans)))
