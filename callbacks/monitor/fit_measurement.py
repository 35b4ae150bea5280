"""The measurement of one fit."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_commopt.callbacks.monitor.averages import WARM_UP_STEPS, RankCounters, StepAverages, averages_between
from lightning_commopt.callbacks.monitor.batch_size import samples_in
from lightning_commopt.callbacks.monitor.host import HostCounters, gpu_sampler_for, network_bytes
from lightning_commopt.callbacks.monitor.left_out import LeftOut
from lightning_commopt.callbacks.monitor.sources import CommSource
from lightning_commopt.callbacks.monitor.step_clock import StepClock
from lightning_commopt.callbacks.monitor.summary import CommSummary
from lightning_commopt.callbacks.monitor.wrapped import WrappedMethods

__all__ = ["FitMeasurement"]

_VALIDATION = re.compile(r"(?<![a-z])(val|valid|validation)(?![a-z])")  # as a word: not `value_loss`


class FitMeasurement:
    """Counts from the first batch of a fit; compares ranks at the end of the warm-up, of each interval, and of the fit.

    Where the method changes, warm-up begins anew, so that averages are those of the last method. Steps that a callback
    records (``CommProfiler``) take longer for it, and are left out.

    Args:
        trainer: About to train.
        source: Statistics of its strategy.
        every_n_steps: Length of an interval; 0 for none.
        exact: Whether ranks and their devices wait for each other before every batch, and devices around backward.

    Attributes:
        measured: Every rank's counters at the end of the warm-up and of the fit, once it has finished.
        rest: The averages since the last interval, once the fit has finished.

    """

    def __init__(self, trainer: "pl.Trainer", source: CommSource, every_n_steps: int, exact: bool = False) -> None:
        self.trainer = trainer
        self.source = source
        self.every_n_steps = every_n_steps
        self.exact = exact
        self.clock = StepClock()
        self._gpu = gpu_sampler_for(trainer.strategy.root_device)
        self._global_step = trainer.global_step
        self._left_out = LeftOut(trainer.callbacks, self._counted)
        self._start = self._first = self._last = self._snapshot()
        self._warm = self._measuring = False
        self._method, self._begun_at = source.method, 0
        self._wrapped = WrappedMethods()
        if source.hidden_barrier:
            self._wrapped.wrap(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", self._hidden_barrier)
        self._wrapped.wrap(trainer, "save_checkpoint", self.clock.paused)
        for callback in trainer.callbacks:
            if hasattr(callback, "examines_run"):
                self._wrapped.wrap(callback, "_ask", self.clock.paused)
        self.clock.resume()

    def batch_begins(self) -> None:
        """Let time count. A collective where times are exact."""
        self.clock.resume()
        self._left_out.batch_begins()
        if self.exact:
            self.synchronize()
            with self.clock.barrier():
                self.source.all_gather(None)

    def synchronize(self) -> None:
        """Wait for the device where times are exact: what was launched belongs to the piece that launched it."""
        device = self.trainer.strategy.root_device
        if self.exact and device.type == "cuda":
            torch.cuda.synchronize(device)

    def batch_done(self, batch: Any) -> StepAverages | None:
        """Count a batch, and the step that it may have ended. A collective at an interval's end.

        Returns:
            The averages of an interval that has ended now.

        """
        self.synchronize()
        repeated = getattr(self.trainer.fit_loop._data_fetcher, "repeats", False)  # under `uneven="join"`
        self.clock.add_samples(0 if repeated else samples_in(batch))
        before, now = self._global_step, self.trainer.global_step
        if now == before:
            return None
        self._global_step = now
        counters = self.clock.close_step(now - before)
        self._left_out.step_done()
        due = self.every_n_steps > 0 and now // self.every_n_steps > before // self.every_n_steps
        if self.source.method != self._method:  # `auto` has changed it, on all ranks alike
            self._method, self._begun_at, self._warm = self.source.method, counters.steps - 1, False
        if not self._warm:
            self._end_warm_up(counters.steps - self._begun_at)
            return None
        return self._end_interval() if due and not self._left_out.now else None

    def finish(self) -> CommSummary:
        """Compare all ranks after the last batch, and say what the fit came to. A collective."""
        self.clock.pause()
        self._left_out.end()
        counted = self._counted()
        last = self._left_out.without(counted)
        averages = averages_between(self._first, last) if self._measuring else StepAverages()
        self.measured = (self._first if self._measuring else last), last
        self.rest = averages_between(self._last, last) if self._measuring else StepAverages()
        stats = [rank.stats for rank in last]
        world = len(last)
        compared = world > 1 and self.source.replicated
        differs = self.source.first_difference() if compared else None
        return CommSummary(
            **{field.name: getattr(averages, field.name) for field in fields(averages)},
            method=stats[0].method,
            world_size=world,
            steps=self.clock.closed.steps,
            left_out_steps=self._left_out.steps,
            skipped_steps=self.source.skipped_steps((counted[0] - self._start[0]).stats),
            memory_mb=max(rank.memory_bytes for rank in stats) / 1e6,
            validation=self.source.all_gather(_validation_loss(self.trainer))[0],
            replicas_equal=differs is None if compared else None,
            first_difference=differs,
            situation=self.source.situation(),
        )

    def restore(self) -> None:
        """Give Lightning its methods back, and end what runs beside. Not a collective."""
        self._wrapped.restore()
        if self._gpu is not None:
            self._gpu.close()

    def _end_warm_up(self, steps: int) -> None:
        """Measure from here on, once there were enough steps."""
        if steps >= WARM_UP_STEPS:
            self._warm = self._measuring = True
            self._first = self._last = self._snapshot()

    def _end_interval(self) -> StepAverages:
        """Average the steps since the last interval."""
        before, self._last = self._last, self._snapshot()
        return averages_between(before, self._last)

    def _snapshot(self) -> list[RankCounters]:
        """Return every rank's counters, without the steps that are left out."""
        return self._left_out.without(self._counted())

    def _counted(self) -> list[RankCounters]:
        """Return every rank's counters; the time for it counts as waiting in the next step."""
        with self.clock.barrier():
            host = replace(HostCounters() if self._gpu is None else self._gpu.read(), network=network_bytes())
            own = self.source.all_gather((self.clock.closed, host))
            return [
                RankCounters(clock, stats, host)
                for (clock, host), stats in zip(own, self.source.gather_stats(), strict=True)
            ]

    @contextmanager
    def _hidden_barrier(self) -> Iterator[None]:
        """Time the question before every batch whether a rank was asked to end."""
        device = self.trainer.strategy.root_device
        if device.type == "cuda":  # it waits for the device anyway, and that is not waiting for other ranks
            torch.cuda.current_stream(device).synchronize()
        with self.clock.barrier():
            yield


def _validation_loss(trainer: "pl.Trainer") -> tuple[str, float] | None:
    """Return name and value of the loss that validation logged."""
    metrics = trainer.callback_metrics
    names = [name for name in metrics if _VALIDATION.search(name.lower()) and "loss" in name.lower()]
    name = "val_loss" if "val_loss" in names else min(names, default=None)
    return None if name is None else (name, float(metrics[name]))
