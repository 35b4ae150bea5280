"""Schedules by name."""

from typing import Literal, get_args

from lightning_commopt.pipeline.actions import Schedule
from lightning_commopt.pipeline.schedules import gpipe, interleaved, one_f_one_b, zero_bubble_v

__all__ = ["ScheduleName", "ideal_bubble", "schedule_named"]

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zbv"]


def schedule_named(name: ScheduleName, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """Return a schedule. All of them take any number of microbatches.

    Args:
        name: Which one.
        ranks: Number of ranks of the pipeline.
        microbatches: Number of microbatches in a step.
        stages_per_rank: Number of stages on each rank. By default, 2 with ``"interleaved"``; the others have a fixed
            number: 2 with ``"zbv"``, else 1.

    Raises:
        ValueError: There is no such schedule, or it cannot have so many stages, ranks or microbatches.

    """
    per_rank = _stages_per_rank(name, stages_per_rank)
    if name == "interleaved":
        return interleaved(ranks, per_rank, microbatches)
    return {"gpipe": gpipe, "1f1b": one_f_one_b, "zbv": zero_bubble_v}[name](ranks, microbatches)


def ideal_bubble(name: ScheduleName, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> float:
    """Return the fraction of a step that ranks wait where all stages are equal and messages take no time.

    It is exact for backwards that take twice as long as their forwards, a half of which ``"zbv"`` puts off; with
    ``"interleaved"`` from ``ranks`` microbatches on, and with ``"zbv"`` from ``2 * ranks - 1`` on. With fewer it is a
    lower bound.

    Args:
        name: Which schedule.
        ranks: Number of ranks of the pipeline.
        microbatches: Number of microbatches in a step.
        stages_per_rank: Number of stages on each rank, as in :func:`schedule_named`.

    """
    per_rank = _stages_per_rank(name, stages_per_rank)
    steps = {"interleaved": per_rank, "zbv": 6}.get(name, 1) * microbatches
    return (ranks - 1) / (steps + ranks - 1)


def _stages_per_rank(name: ScheduleName, wanted: int | None) -> int:
    if name not in get_args(ScheduleName):
        raise ValueError(f"`schedule={name!r}` must be one of {', '.join(map(repr, get_args(ScheduleName)))}.")
    if name == "interleaved":
        if wanted is not None and wanted < 2:
            raise ValueError(f"`stages_per_rank={wanted}`: `interleaved` needs at least 2; `1f1b` has 1.")
        return wanted or 2
    fixed = 2 if name == "zbv" else 1
    if wanted not in (None, fixed):
        raise ValueError(
            f"`stages_per_rank={wanted}`: `{name}` has {fixed}; only `interleaved` takes another number of 2 or more."
        )
    return fixed
