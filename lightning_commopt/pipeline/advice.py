"""Which stage is too heavy, and where to cut instead."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_commopt.pipeline.actions import Schedule
from lightning_commopt.pipeline.balance import balance
from lightning_commopt.pipeline.simulate import StageCost, simulate

__all__ = ["Advice", "advise"]

# A step that is not shorter by this much is not worth another cut: measured costs vary more.
_WORTH = 0.02


@dataclass(frozen=True)
class Advice:
    """What the measured costs of stages say about the cuts.

    Args:
        heaviest: The stage with the longest forward and backward.
        seconds: Its forward and backward of one microbatch.
        mean: The mean of all stages.
        cuts: First block of each stage but the first, as now.
        bubble: The bubble with these, simulated.
        better: Better cuts; None where these are good.
        better_bubble: The bubble with the better ones, simulated.
        saved: The fraction of a step that they save, simulated.

    """

    heaviest: int
    seconds: float
    mean: float
    cuts: tuple[int, ...]
    bubble: float
    better: tuple[int, ...] | None
    better_bubble: float
    saved: float

    def __str__(self) -> str:
        load = (
            f"Stage {self.heaviest} is the heaviest with {1e3 * self.seconds:.3g} ms a microbatch (mean "
            f"{1e3 * self.mean:.3g} ms); bubble {self.bubble:.1%}."
        )
        if self.better is None:
            return f"{load} No other cuts would shorten the step by {_WORTH:.0%}."
        return (
            f"{load} `cuts={list(self.better)}` instead of {list(self.cuts)} would shorten the step by "
            f"{self.saved:.0%}, to a bubble of {self.better_bubble:.1%}."
        )


def advise(
    schedule: Schedule,
    costs: Sequence[StageCost],
    cuts: Sequence[int],
    block_costs: Sequence[float],
    places: Sequence[int] | None = None,
) -> Advice:
    """Look for better cuts.

    The measured cost of a stage is shared out among its blocks in proportion to what they were expected to cost.

    Args:
        schedule: What each rank computes.
        costs: Measured, of each stage, in seconds.
        cuts: The first block of each stage but the first.
        block_costs: What each block was expected to cost, in any unit, such as floating-point operations.
        places: Blocks before which the model may be cut; all by default.

    Raises:
        ValueError: There are not as many costs and cuts as stages.

    """
    if not len(costs) == schedule.stages == len(cuts) + 1:
        raise ValueError(f"`{schedule.stages}` stages have `{len(costs)}` costs and `{len(cuts)}` cuts.")
    blocks = _blocks(costs, cuts, block_costs)
    starts = [0, *(range(1, len(blocks)) if places is None else places)]
    pieces = [_total(blocks[first:last]) for first, last in pairwise([*starts, len(blocks)])]
    better = tuple(starts[piece] for piece in balance([_load(piece) for piece in pieces], schedule.stages))
    now = simulate(schedule, costs)
    then = simulate(schedule, [_total(blocks[first:last]) for first, last in pairwise([0, *better, len(blocks)])])
    saved = 1 - then.step / now.step
    loads = [_load(cost) for cost in costs]
    heaviest = max(range(schedule.stages), key=loads.__getitem__)
    mean = sum(loads) / len(loads)
    worth = better if saved >= _WORTH else None
    return Advice(heaviest, loads[heaviest], mean, tuple(cuts), now.bubble, worth, then.bubble, saved)


def _blocks(costs: Sequence[StageCost], cuts: Sequence[int], expected: Sequence[float]) -> list[StageCost]:
    """Return the cost of each block."""
    blocks = []
    for cost, (first, last) in zip(costs, pairwise([0, *cuts, len(expected)]), strict=True):
        total = sum(expected[first:last])
        for block in range(first, last):
            share = expected[block] / total if total else 1 / (last - first)
            blocks.append(StageCost(cost.forward * share, cost.backward * share, cost.weight * share))
    return blocks


def _total(costs: Sequence[StageCost]) -> StageCost:
    forward, backward, weight = (sum(c) for c in zip(*((c.forward, c.backward, c.weight) for c in costs), strict=True))
    return StageCost(forward, backward, min(weight, backward))


def _load(cost: StageCost) -> float:
    return cost.forward + cost.backward
