"""What the bubble of a step was, what it should be, and what would make it smaller."""

from collections.abc import Sequence

from lightning_commopt.pipeline.actions import Schedule
from lightning_commopt.pipeline.advice import advise
from lightning_commopt.pipeline.measured import MeasuredStep, stage_costs
from lightning_commopt.pipeline.named import ScheduleName, ideal_bubble

__all__ = ["bubble_report"]


def bubble_report(
    name: ScheduleName,
    schedule: Schedule,
    measured: MeasuredStep,
    cuts: Sequence[int],
    block_costs: Sequence[float],
    places: Sequence[int] | None = None,
) -> str:
    """Return the bubble of a step as text: measured, simulated with the measured costs, and that of equal stages.

    Args:
        name: Of the schedule.
        schedule: What each rank computed.
        measured: The step.
        cuts: The first block of each stage but the first.
        block_costs: What each block was expected to cost, in any unit.
        places: Blocks before which the model may be cut; all by default.

    """
    ideal = ideal_bubble(name, schedule.ranks, schedule.microbatches, schedule.stages // schedule.ranks)
    by_rank = ", ".join(f"{bubble:.1%}" for bubble in measured.bubbles)
    simulated = measured.simulated(schedule).bubble
    advice = advise(schedule, stage_costs(measured.timelines, schedule.stages), cuts, block_costs, places)
    return (
        f"Bubble of `{name}` with {schedule.microbatches} microbatches: {measured.bubble:.1%} of a step of "
        f"{1e3 * measured.step:.3g} ms (by rank: {by_rank}). With the measured times of stages alone it would be "
        f"{simulated:.1%}, with equal stages {ideal:.1%}. {advice}"
    )
