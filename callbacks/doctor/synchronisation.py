"""Check 4: all ranks hold the same parameters."""

from typing import Any, ClassVar

from typing_extensions import override

from lightning_commopt.callbacks.doctor.check import Check, Run
from lightning_commopt.callbacks.doctor.finding import Finding

__all__ = ["SynchronisationCheck"]


class SynchronisationCheck(Check):
    """A hash of all parameters is compared every few steps, to the end of the fit."""

    name = "synchronisation"
    lasting: ClassVar[bool] = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._drift: tuple[int, str, tuple[int, ...]] | None = None
        self._compared = 0
        self._local = self._in_parts = ""

    @override
    def train_start(self) -> None:
        self._local = _local_policy(self.run.trainer.strategy)
        self._in_parts = self.run.view.not_compared

    @override
    def batch_end(self, outputs: Any, steps: int) -> None:
        every, done = self.run.options.hash_every_n_steps, self.run.steps_done
        if steps and done // every > (done - steps) // every:
            self._compare()

    @override
    def findings(self) -> list[Finding]:
        if self.run.world == 1:
            return [self.unchecked("one process: there are no replicas.")]
        if self._compared != self.run.steps_done:
            self._compare()
        if self._local:
            return [self.unchecked(f"{self._local}: ranks differ between two exchanges, as they should")]
        if self._in_parts:
            return [self.unchecked(f"{self._in_parts}; {self._policy()}.")]
        if self._drift is None:
            return [self.fine(f"parameters are equal on all ranks after step {self._compared}; {self._policy()}")]
        step, name, ranks = self._drift
        return [
            self.found(
                f"`{name}` on rank {ranks[0]} differs from rank 0 at step {step}; {self._policy()}",
                "look for code that changes parameters on one rank only (`if self.global_rank == 0`), for a branch "
                "that skips `backward`, and for parameters outside of the module in training; "
                f"`hash_every_n_steps=1` finds the step (now {self.run.options.hash_every_n_steps})",
                rank=ranks[0],
                number=step,
            )
        ]

    def _compare(self) -> None:
        """Compare now, until ranks have differed once. A collective."""
        if self.run.world == 1 or self._local or self._in_parts or self._drift is not None:
            return
        self._compared = self.run.steps_done
        differs = self.run.view.first_difference(self.run.all_gather)
        if differs is not None:
            self._drift = self._compared, *differs

    def _policy(self) -> str:
        """Say when ranks meet."""
        accumulated = self.run.trainer.accumulate_grad_batches
        if not self.run.module.automatic_optimization:
            return "gradients are exchanged in each backward pass (manual optimisation)"
        if accumulated > 1 and self.run.view.every_backward:
            return f"gradients are exchanged in each of {accumulated} accumulated batches"
        if accumulated > 1:
            return f"gradients are exchanged once in {accumulated} accumulated batches"
        return "gradients are exchanged in every step"


def _local_policy(strategy: Any) -> str:
    """Name a policy under which ranks take steps of their own; empty where there is none."""
    if getattr(strategy, "_model_averager", None) is not None:
        return f"post-local SGD is in force (parameters are averaged every {strategy._model_averaging_period} steps)"
    sync = getattr(strategy, "sync", "every_step")
    return "" if sync in ("every_step", None) else f"the sync policy `{sync}` is in force"
