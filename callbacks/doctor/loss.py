"""Check 7: whether the loss falls."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_commopt.callbacks.doctor.check import Check, Run, loss_of
from lightning_commopt.callbacks.doctor.finding import Finding
from lightning_commopt.callbacks.lr_scaling import LinearLRScaling
from lightning_commopt.callbacks.lr_scaling.loss_curve import LossCurve, Unsteady

__all__ = ["LossCheck"]

_PENDING = 100  # steps whose losses wait on the device


class LossCheck(Check):
    """The mean loss over ranks is watched for oscillation and divergence, to the end of the fit."""

    name = "loss"
    lasting: ClassVar[bool] = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._curve = LossCurve()
        self._unsteady: Unsteady | None = None
        self._first: float | None = None
        self._last: float | None = None
        self._losses: list[float] = []
        self._pending: list[Tensor] = []
        self._window: list[Tensor] = []

    @override
    def batch_end(self, outputs: Any, steps: int) -> None:
        if (loss := loss_of(outputs)) is not None:
            self._window.append(loss.clone())
        if steps and self._window:
            self._pending.append(self._mean())
            self._window = []
            if len(self._pending) >= _PENDING:
                self._settle()

    def _mean(self) -> Tensor:
        """Return the mean of the batches of a step."""
        mean = torch.stack(self._window).mean()
        if self.run.module.automatic_optimization:  # Lightning has divided each
            mean *= self.run.trainer.accumulate_grad_batches
        return mean

    def _settle(self) -> None:
        if self._pending:
            self._losses += torch.stack(self._pending).tolist()
            self._pending = []

    @override
    def findings(self) -> list[Finding]:
        self._settle()
        ranks = self.run.all_gather(self._losses)
        self._losses = []
        means = [sum(losses) / len(losses) for losses in zip(*ranks, strict=False)]
        if means:
            self._first, self._last = means[0] if self._first is None else self._first, means[-1]
            self._unsteady = self._unsteady or self._curve.add(means)
        if self._first is None:
            return [self.unchecked("`training_step` returned no loss.")]
        if self._unsteady is None:
            few = self._curve.steps < 2 * self._curve.window
            answer = f"loss {self._first:.4g} in step 1, {self._last:.4g} in step {self._curve.steps}"
            return [self.unchecked(f"{answer}: too few steps to judge.") if few else self.fine(answer)]
        seen = self._unsteady
        return [self.found(f"{seen.kind}: {seen.text}", self._remedy(seen), number=float(seen.step))]

    def _remedy(self, seen: Unsteady) -> str:
        if seen.kind == "not finite":
            return "see the check `gradients`; a lower learning rate or `gradient_clip_val=1.0` may prevent it"
        scaling = next((c for c in self.run.trainer.callbacks if isinstance(c, LinearLRScaling)), None)
        if scaling is not None and (scaling.factor or 1) > 1:
            return (
                f"the learning rate was scaled by {scaling.factor:.3g}: use "
                "`LinearLRScaling(on_oscillation='reduce')`, a longer warm-up, or `rule='sqrt'`"
            )
        return (
            "halve the learning rate, warm it up (`LinearLRScaling` does), or set `Trainer(gradient_clip_val=1.0)`; a "
            f"batch of {self.run.world} ranks needs another rate than that of one"
        )
