"""What a fit came to."""

from dataclasses import dataclass

from lightning_commopt.callbacks.monitor.advice import Advice, Situation, advise
from lightning_commopt.callbacks.monitor.averages import StepAverages

__all__ = ["CommSummary"]


@dataclass(frozen=True, kw_only=True)
class CommSummary(StepAverages):
    """The numbers of the end table; the same on every rank.

    Averages leave out the warm-up steps, and those that ``CommProfiler`` recorded.

    Args:
        method: The compression method in force; ``"ddp"`` under Lightning's own strategy.
        world_size: Ranks.
        steps: Optimizer steps of the fit.
        left_out_steps: Those that were recorded, and are in no average for it.
        skipped_steps: Those that were not applied because of a non-finite gradient; None where nobody counts them.
        memory_mb: Extra memory of the method, on the rank that has most.
        validation: Name and value (on rank 0) of the last validation loss; None when there was none.
        replicas_equal: Whether all ranks ended with the same bits in every parameter; None for one process,
            and where parameters are sharded.
        first_difference: Where they do not: the first parameter that differs, and the ranks where it differs from
            rank 0.
        situation: What else was in force.
        **averages: As in :class:`StepAverages`.

    """

    method: str
    world_size: int
    steps: int
    skipped_steps: int | None
    memory_mb: float
    validation: tuple[str, float] | None = None
    replicas_equal: bool | None = None
    first_difference: tuple[str, tuple[int, ...]] | None = None
    left_out_steps: int = 0
    situation: Situation = Situation()

    @property
    def advice(self) -> Advice:
        """What bounded the run, and what to do about it."""
        return advise(self, self.method, self.situation)
