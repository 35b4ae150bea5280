"""What a step of a pipeline took, from when its actions ran."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from lightning_commopt.pipeline.actions import Kind, Schedule
from lightning_commopt.pipeline.simulate import Simulation, StageCost, simulate
from lightning_commopt.pipeline.timing import Timed, TimedStep

__all__ = ["MeasuredStep", "stage_costs", "typical_step"]


@dataclass(frozen=True)
class MeasuredStep:
    """One step of all ranks of a pipeline.

    Args:
        timelines: When each action ran, by rank.
        step: Seconds that the step took, on the rank where it took longest.

    """

    timelines: tuple[tuple[Timed, ...], ...]
    step: float

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Fraction of the step that each rank did not compute."""
        return tuple(1 - sum(end - start for _, start, end in timeline) / self.step for timeline in self.timelines)

    @property
    def bubble(self) -> float:
        """Mean over all ranks of the fraction of the step that they did not compute."""
        return sum(self.bubbles) / len(self.timelines)

    def simulated(self, schedule: Schedule, transfer: float = 0.0) -> Simulation:
        """Return how long the same actions would take with no delay but ``transfer`` seconds a message."""
        return simulate(schedule, stage_costs(self.timelines, schedule.stages), transfer)


def typical_step(by_rank: Sequence[Sequence[TimedStep]]) -> tuple[int, MeasuredStep] | None:
    """Return the number of microbatches, and the times, of a step of median length, out of those with most of them.

    Args:
        by_rank: The same steps on all ranks of a pipeline, in their order.

    Returns:
        None if there are no steps.

    """
    steps = list(zip(*by_rank, strict=True))
    if not steps:
        return None
    most = max(step[0].microbatches for step in steps)
    full = sorted(
        (step for step in steps if step[0].microbatches == most), key=lambda step: max(one.seconds for one in step)
    )
    chosen = full[(len(full) - 1) // 2]
    return most, MeasuredStep(tuple(one.timeline for one in chosen), max(one.seconds for one in chosen))


def stage_costs(timelines: Iterable[Iterable[Timed]], stages: int) -> list[StageCost]:
    """Return the median cost of a microbatch on each stage, in seconds.

    Args:
        timelines: When each action ran, by rank.
        stages: Number of stages.

    Raises:
        ValueError: A stage has no timed forward.

    """
    seconds: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        for action, start, end in timeline:
            seconds[action.kind, action.stage].append(end - start)
    if missing := [stage for stage in range(stages) if (Kind.FORWARD, stage) not in seconds]:
        raise ValueError(f"No forward of stage `{missing[0]}` was timed.")
    return [_cost(seconds, stage) for stage in range(stages)]


def _cost(seconds: dict[tuple[Kind, int], list[float]], stage: int) -> StageCost:
    of_kind = {kind: median(seconds.get((kind, stage), [0.0])) for kind in Kind}
    weight = of_kind[Kind.BACKWARD_WEIGHT]
    return StageCost(of_kind[Kind.FORWARD], of_kind[Kind.BACKWARD] + of_kind[Kind.BACKWARD_INPUT] + weight, weight)
