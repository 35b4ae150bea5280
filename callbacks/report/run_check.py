"""Whether the values of a run belong together, each of which is of its type."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from lightning_commopt.callbacks.monitor.summary import CommSummary
from lightning_commopt.callbacks.report.content import RecordedSteps, ReportContent
from lightning_commopt.callbacks.report.history import Interval
from lightning_commopt.measure import Traffic

__all__ = ["check_run"]

_PARTS = ("compute_ms", "exposed_comm_ms", "waiting_ms")
_KINDS = tuple(field.name for field in fields(Traffic))


def check_run(content: ReportContent) -> None:
    """Check what a page and a plan rely on.

    Args:
        content: As it was read.

    Raises:
        ValueError: A value is missing, though others need it, or is out of its bounds; with the place.

    """
    _check_summary(content.summary)
    for place, interval in enumerate(content.intervals):
        _check_interval(interval, f"intervals[{place}]")
    if content.recorded is not None:
        _check_recorded(content.recorded)
    for place, (kind, _) in enumerate(content.kinds):
        if kind not in _KINDS:
            raise ValueError(f"`kinds[{place}]` is {kind!r} and none of {', '.join(_KINDS)}.")
    _check_finite(content.kinds, "kinds")
    _check_finite(content.groups, "groups")
    _check_finite(content.measured.samples, "measured.samples")


def _check_summary(summary: CommSummary) -> None:
    _check_finite(summary.by_rank, "summary.by_rank")
    _check_finite(summary.dense_mb_per_step, "summary.dense_mb_per_step")
    if summary.step_ms is None:
        return
    if not 0 < summary.step_ms < math.inf:
        raise ValueError(f"`summary.step_ms` is {summary.step_ms} and must be above 0.")
    if summary.world_size == 1:
        return
    _check_parts(summary, _PARTS, "summary", "summary.step_ms")
    if not summary.by_rank:
        raise ValueError("`summary.by_rank` is empty, though `summary.step_ms` is there.")


def _check_interval(interval: Interval, where: str) -> None:
    for name in _PARTS:
        _check_finite(getattr(interval, name), f"{where}.{name}")
    if interval.compute_ms is not None:
        _check_parts(interval, _PARTS[1:], where, f"{where}.compute_ms")


def _check_recorded(recorded: RecordedSteps) -> None:
    _check_finite(recorded.ranks, "recorded.ranks")
    if not recorded.ranks:
        raise ValueError("`recorded.ranks` is empty.")
    for rank, spans in enumerate(recorded.ranks):
        if not any(span.phase == "step" for span in spans):
            raise ValueError(f"`recorded.ranks[{rank}]` has no span of the phase `step`.")


def _check_parts(values: object, names: tuple[str, ...], where: str, beside: str) -> None:
    for name in names:
        if getattr(values, name) is None:
            raise ValueError(f"`{where}.{name}` is missing, though `{beside}` is there.")


def _check_finite(value: object, where: str) -> None:
    for place, number in _floats(value, where):
        if not math.isfinite(number):
            raise ValueError(f"`{place}` is {number} and must be finite.")


def _floats(value: object, where: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, float):
        yield where, value
    elif isinstance(value, tuple) and not hasattr(value, "_fields"):
        for place, inner in enumerate(value):
            yield from _floats(inner, f"{where}[{place}]")
    elif isinstance(value, tuple):
        for name, inner in zip(value._fields, value, strict=True):
            yield from _floats(inner, f"{where}.{name}")
    elif is_dataclass(value):
        for field in fields(value):
            yield from _floats(getattr(value, field.name), f"{where}.{field.name}")
