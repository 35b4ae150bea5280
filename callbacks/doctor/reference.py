"""Check 6: the same first steps in one process."""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commopt.callbacks.doctor.check import Check, Run, loss_of
from lightning_commopt.callbacks.doctor.finding import Finding
from lightning_commopt.callbacks.doctor.random_streams import read_streams
from lightning_commopt.callbacks.doctor.replay import MicroBatch, RecordedStep, Replay
from lightning_commopt.callbacks.monitor.wrapped import WrappedMethods

__all__ = ["ReferenceCheck"]


class ReferenceCheck(Check):
    """Records the first steps, then repeats them on a copy of module and optimizer that holds all ranks' batches.

    Every rank repeats them alike, each batch with the random numbers it was trained with, so that dropout drops the
    same and nobody waits. Learning rates are those that were used. The two loss curves are compared.
    """

    name = "reference"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._steps: list[RecordedStep] = []
        self._current = RecordedStep()
        self._batch: Any = None
        self._batch_idx = 0
        self._start: tuple[nn.Module, Optimizer] | None = None
        self._why_not = ""
        self._wrapped = WrappedMethods()
        self._answer: list[Finding] | None = None

    @override
    def train_start(self) -> None:
        if self.run.options.reference_steps:
            self._why_not = why_not(self.run)
            if not self._why_not:
                self._wrapped.wrap(self.run.trainer.strategy, "training_step", self._training_step)

    @override
    def batch_start(self, batch: Any, batch_idx: int) -> None:
        if not self._recording:
            return
        self._batch, self._batch_idx = batch, batch_idx
        if self._start is None:
            try:
                compiler = {id(self.run.module._compiler_ctx): None}  # is not copied
                module, (optimizer,) = copy.deepcopy((self.run.module, self.run.trainer.optimizers), compiler)
            except Exception as error:  # a module may hold anything
                self._why_not = f"the module cannot be copied: {type(error).__name__}: {error}"
            else:
                self._start = module, optimizer

    @contextmanager
    def _training_step(self) -> Iterator[None]:
        """Keep the batch as it is now, with the random numbers that it will meet."""
        if self._recording and len(self._current.batches) == self._current.ended:
            streams = read_streams(self.run.trainer.strategy.root_device)
            self._current.batches.append(MicroBatch.of(self._batch, self._batch_idx, streams))
        yield

    @override
    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        if self._recording:
            self._current.note_options(optimizer)

    @override
    def batch_end(self, outputs: Any, steps: int) -> None:
        if not self._recording:
            return
        self._current.ended += 1
        loss = loss_of(outputs)
        if loss is not None:  # Lightning has divided it
            self._current.losses.append(loss.clone() * self.run.trainer.accumulate_grad_batches)
        if steps:
            self._current.divisor = self._divisor()
            self._steps.append(self._current)
            self._current = RecordedStep()

    @override
    def findings(self) -> list[Finding]:
        if self._answer is None:
            self._answer = self._compared()
        return self._answer

    @override
    def close(self) -> None:
        self._wrapped.restore()
        self._start, self._steps, self._batch = None, [], None

    @property
    def _recording(self) -> bool:
        wanted = self.run.options.reference_steps
        return not self._why_not and len(self._steps) < wanted

    def _divisor(self) -> int:
        """Return by what the gradients of this window were divided."""
        nominal = self.run.trainer.accumulate_grad_batches
        return len(self._current.batches) if getattr(self.run.trainer.strategy, "true_mean", False) else nominal

    def _compared(self) -> list[Finding]:
        if not self.run.options.reference_steps:
            return [self.unchecked("not asked for.", "`DistributedDoctor(reference_steps=10)` repeats the first steps")]
        reasons = [why for why in self.run.all_gather(self._why_not) if why]
        if reasons or self._start is None or not self._steps:
            return [self.unchecked(next(iter(reasons), "no step was taken."))]
        replay = Replay(self.run, *self._start)
        mine = [float(torch.stack(step.losses).mean()) if step.losses else math.nan for step in self._steps]
        ours = [sum(losses) / len(losses) for losses in zip(*self.run.all_gather(mine), strict=True)]
        alone, error = replay.losses(self._steps)
        self.close()
        if error:
            return [self.unchecked(f"the steps cannot be repeated in one process: {error}")]
        return [self._verdict(ours, alone)]

    def _verdict(self, ours: list[float], alone: list[float]) -> Finding:
        tolerance = self.run.options.reference_tolerance
        apart = [_apart(a, b) for a, b in zip(ours, alone, strict=True)]
        step = next((i for i, distance in enumerate(apart) if not distance <= tolerance), None)
        curves = f"all ranks {_curve(ours)}; one process {_curve(alone)}"
        if step is None:
            largest = max(apart)
            return self.fine(
                f"{len(ours)} steps in one process give the same losses (within {largest:.1e} of them): {curves}",
                number=largest,
            )
        return self.found(
            f"the loss parts from that of one process at step {step + 1} ({ours[step]:.4g}, not {alone[step]:.4g}, "
            f"tolerance {tolerance:.0%}): {curves}",
            "a difference in step 1 comes from the data or the forward pass (batch norm, code that asks for the rank), "
            "a later one from gradients or the optimizer: try `compression='none'`, then look at hooks that change "
            "gradients",
            number=step + 1,
        )


def why_not(run: Run) -> str:
    """Say why the steps of this fit cannot be repeated in one process; empty where they can."""
    trainer, module = run.trainer, run.module
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    joined = getattr(getattr(trainer.strategy, "_uneven", None), "policy", "") == "join"
    reasons = {
        run.view.in_parts: bool(run.view.in_parts),
        "manual optimisation takes steps of its own": not module.automatic_optimization,
        "a gradient scaler decides which steps count": scaler is not None and scaler.is_enabled(),
        "`SyncBatchNorm` computes over ranks": any(isinstance(m, nn.SyncBatchNorm) for m in module.modules()),
        "`training_step(dataloader_iter)` draws its batches itself": isinstance(
            trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher
        ),
        "`uneven='join'` weights losses": joined,
        **{f"the module overrides `{hook}`": is_overridden(hook, module) for hook in ("optimizer_step", "backward")},
    }
    return next((f"{reason}." for reason, holds in reasons.items() if holds), "")


def _apart(a: float, b: float) -> float:
    """Return the distance of two losses as a part of the second; both not finite is no distance."""
    if not math.isfinite(a) and not math.isfinite(b):
        return 0.0
    return abs(a - b) / max(abs(b), 1e-12) if a != b else 0.0


def _curve(losses: list[float]) -> str:
    """Return at most five losses of a curve."""
    chosen = losses if len(losses) <= 5 else [losses[round(i * (len(losses) - 1) / 4)] for i in range(5)]
    return " ".join(f"{loss:.4g}" for loss in chosen)
