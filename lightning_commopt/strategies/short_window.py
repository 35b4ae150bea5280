"""The last accumulation window of an epoch, when it is shorter than the others."""

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor

__all__ = ["ShortWindow"]


class ShortWindow:
    """Gives a short last window its true mean, or says that Lightning does not.

    Lightning divides every loss by ``accumulate_grad_batches``, also in a last window of fewer batches, whose gradient
    then comes out too small by the factor real length / nominal length.

    Args:
        true_mean: Whether to undo that, before gradients are exchanged. Otherwise it is reported once.

    """

    def __init__(self, true_mean: bool) -> None:
        self.true_mean = true_mean
        self._reported = False

    def weighted(self, loss: Tensor, module: "pl.LightningModule", accumulated: list[Tensor] | None = None) -> Tensor:
        """Return the loss to run backward on; gradients accumulated in this window are scaled likewise.

        Args:
            loss: The loss of the batch at hand, divided by the nominal length, 0-d.
            module: The module under automatic optimisation; a manual one divides its own losses.
            accumulated: Gradients of the window so far, where parameters do not have them.

        """
        trainer = module.trainer
        nominal = trainer.accumulate_grad_batches
        if nominal == 1 or not module.automatic_optimization:
            return loss
        loop = trainer.fit_loop.epoch_loop
        length = loop.batch_idx % nominal + 1
        if length == nominal or not loop._num_ready_batches_reached():
            return loss
        if not self.true_mean:
            self._report(length, nominal)
            return loss
        factor = nominal / length
        gradients = accumulated
        if gradients is None:
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
        if length > 1 and gradients:
            torch._foreach_mul_(gradients, factor)
        return loss * factor

    def _report(self, length: int, nominal: int) -> None:
        if not self._reported:
            rank_zero_warn(
                f"The last accumulation window of the epoch has {length} of {nominal} batches, and Lightning divides "
                f"its losses by {nominal}: its gradient is {length / nominal:.2f} of the mean. "
                "`true_mean=True` divides by the real length."
            )
            self._reported = True
