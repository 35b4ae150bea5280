"""What is done when the loss swings or rises after the learning rate was scaled."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_commopt.callbacks.lr_scaling.loss_curve import LossCurve, Unsteady
from lightning_commopt.callbacks.lr_scaling.scaler import LRScaler

__all__ = ["OscillationGuard"]

_STEP_DOWN = 0.5


class OscillationGuard:
    """Watches the mean loss over ranks, and warns or lowers the rate. The same on all ranks.

    Ranks talk to each other at the end of each window of the curve: rank 0 decides, all act at the same step.

    Args:
        scaler: Of the fit that begins.
        reduce: Whether to lower the rate; else it only warns.
        state: Of a run that is resumed; empty for none.

    """

    def __init__(self, scaler: LRScaler, reduce: bool, state: dict[str, Any]) -> None:
        self._scaler = scaler
        self._trainer: pl.Trainer = scaler.trainer
        self._reduce = reduce
        self._curve = LossCurve()
        self._means: list[float] = []
        self._said: list[str] = []
        if state:
            self._curve.load_state_dict(state["curve"])
            self._means, self._said = list(state["means"]), list(state["said"])
            self._resume(state["reduction"])
        self._pending: list[Tensor] = []
        self._batches: list[Tensor] = []
        self._global_step = self._trainer.global_step

    def batch_done(self, outputs: Any) -> None:
        """Note the loss of a batch, and the step that it may have ended. A collective at a window's end.

        Args:
            outputs: What Lightning passes to callbacks.

        Raises:
            ValueError: There is no loss in it.

        """
        self._batches.append(self._loss(outputs))
        if self._trainer.global_step == self._global_step:
            return
        self._global_step = self._trainer.global_step
        self._pending.append(torch.stack(self._batches).mean())
        self._batches = []
        if len(self._means) + len(self._pending) >= self._curve.window:
            self.settle()
            seen = self._trainer.strategy.broadcast(self._curve.add(self._means))
            self._means = []
            if seen is not None:
                self._act(seen)

    def settle(self) -> None:
        """Average over ranks what was noted so far, so that it can be saved. A collective."""
        if self._pending:
            mean = self._trainer.strategy.reduce(torch.stack(self._pending), reduce_op="mean")
            assert isinstance(mean, Tensor)
            self._means += mean.tolist()
            self._pending = []

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run goes on from."""
        return {
            "reduction": self._scaler.reduction,
            "curve": self._curve.state_dict(),
            "means": list(self._means),
            "said": list(self._said),
        }

    def _resume(self, reduction: float) -> None:
        if reduction < 1:
            self._scaler.reduce_to(reduction)
            rank_zero_info(
                f"`LinearLRScaling`: the learning rate goes on at {reduction:.3g} of what is planned, since the loss "
                "had swung before the checkpoint."
            )

    def _loss(self, outputs: Any) -> Tensor:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(
                "`LinearLRScaling(on_oscillation=...)` needs the loss of every batch: return it from `training_step`, "
                "or choose `on_oscillation='off'`."
            )
        automatic = self._trainer.lightning_module.automatic_optimization
        return loss.detach().float().reshape(()) * (self._trainer.accumulate_grad_batches if automatic else 1)

    def _act(self, seen: Unsteady) -> None:
        """Do what was asked for."""
        scaler, lowest = self._scaler, min(1.0, 1.0 / self._scaler.factor)
        before = scaler.reduction
        self._curve.restart()
        if self._reduce and seen.kind != "not finite" and before > lowest:
            scaler.reduce_to(max(before * _STEP_DOWN, lowest))
            rank_zero_warn(
                f"`LinearLRScaling`: {seen.text}. The learning rate goes on at {scaler.reduction:.3g} of what was "
                f"planned, {scaler.reduction * scaler.factor:.3g} times the base rate at the peak."
            )
        elif seen.kind not in self._said:
            self._said.append(seen.kind)
            rank_zero_warn(f"`LinearLRScaling`: {seen.text}. {self._advice(before <= lowest)}")

    def _advice(self, at_base: bool) -> str:
        if at_base:
            return (
                "The learning rate is that of the base batch, so its scaling is not the cause: look at the data and "
                "gradients (`DistributedDoctor`), or lower the rate itself."
            )
        return (
            f"The learning rate is scaled by {self._scaler.factor:.3g}: choose `on_oscillation='reduce'`, a longer "
            "warm-up, or `rule='sqrt'`."
        )
