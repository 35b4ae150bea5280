"""Whether an optimizer step was applied, under any strategy."""

import lightning.pytorch as pl
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.optim import Optimizer

from lightning_commopt.strategies.applied_steps import AppliedSteps

__all__ = ["StepVerdict"]


class StepVerdict:
    """Asks those who skip steps on their own: the gradient scaler, and DeepSpeed's engine.

    Args:
        trainer: About to train. Its scaler's ``update`` is wrapped until :meth:`close`.

    """

    def __init__(self, trainer: "pl.Trainer") -> None:
        self._strategy = trainer.strategy
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._scaler = AppliedSteps(scaler) if scaler is not None and scaler.is_enabled() else None

    def applied(self, optimizer: Optimizer) -> bool:
        """Return whether the last step was applied, the same on all ranks. A collective under a scaler."""
        if isinstance(self._strategy, DeepSpeedStrategy):
            return bool(self._strategy.deepspeed_engine.was_step_applied())
        if self._scaler is None:
            return True
        return self._strategy.reduce_boolean_decision(bool(self._scaler.applied(optimizer)))

    def close(self) -> None:
        """Give the scaler its own ``update`` back. No effect the second time."""
        if self._scaler is not None:
            self._scaler.close()
            self._scaler = None
