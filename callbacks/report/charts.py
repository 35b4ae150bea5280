"""The charts of a report. Each is an `<svg>` element, empty where there is nothing to show."""

import math
from collections.abc import Sequence
from typing import Any

from lightning_commopt.callbacks.monitor.averages import RankTimes, StepAverages
from lightning_commopt.callbacks.report.drawing import INK, LOOKS, drawing, svg
from lightning_commopt.callbacks.report.history import Interval
from lightning_commopt.callbacks.report.traffic import GroupTraffic

__all__ = [
    "MOST_RANKS",
    "error_chart",
    "groups_chart",
    "kinds_chart",
    "loss_chart",
    "losses_chart",
    "ranks_chart",
    "runs_chart",
    "split_chart",
]

WIDTH = 4.8  # inches: text of 10 pt stays readable on a phone
_PARTS = ("compute", "exposed_comm", "waiting")
MOST_RANKS = 24
_MOST_GROUPS = 12
_LINES, _MARKS = ("-", "--", ":", "-."), "os^xD"  # five and four: twenty runs look different


def split_chart(intervals: Sequence[Interval]) -> str:
    """How a step's time was split, over the run."""
    shown = [interval for interval in intervals if interval.compute_ms is not None]
    if not shown:
        return ""
    with drawing():
        figure, axes = _axes(2.7)
        left = [interval.first_step - 0.5 for interval in shown]
        widths = [interval.steps for interval in shown]
        bottom = [0.0] * len(shown)
        edge = {"linewidth": 0.4 if len(shown) <= 40 else 0.0}
        for part in _PARTS:
            times = [getattr(interval, f"{part}_ms") for interval in shown]
            axes.bar(left, times, widths, bottom, align="edge", label=LOOKS[part].label, **(LOOKS[part].bar | edge))
            bottom = [below + time for below, time in zip(bottom, times, strict=True)]
        axes.set(xlabel="optimizer step", ylabel="ms a step", xlim=(left[0], left[-1] + widths[-1]))
        _whole_numbers(axes.xaxis)
        _legend(axes)
        text = f"From {bottom[0]:.3g} ms a step at the beginning to {bottom[-1]:.3g} ms at the end."
        return svg(figure, "split", "Step time, split into compute, exposed communication and waiting", text)


def loss_chart(intervals: Sequence[Interval]) -> str:
    """Training loss and learning rate."""
    curves = [("loss", "training loss", "-o"), ("learning_rate", "learning rate", "--s")]
    curves = [curve for curve in curves if any(getattr(interval, curve[0]) is not None for interval in intervals)]
    if not curves:
        return ""
    with drawing():
        figure, all_axes = _rows(1.35 * len(curves) + 0.4, len(curves))
        for axes, (name, label, style) in zip(all_axes, curves, strict=True):
            _curve(axes, intervals, name, style)
            axes.set_ylabel(label)
            axes.margins(y=0.15)
        all_axes[-1].set_xlabel("optimizer step")
        _whole_numbers(all_axes[-1].xaxis)
        losses = [interval.loss for interval in intervals if interval.loss is not None]
        text = f"The loss goes from {losses[0]:.4g} to {losses[-1]:.4g}." if losses else "No loss was returned."
        return svg(figure, "loss", "Training loss and learning rate", text)


def error_chart(intervals: Sequence[Interval]) -> str:
    """Compression error over the run."""
    errors = [interval.compression_error for interval in intervals if interval.compression_error is not None]
    if not errors:
        return ""
    with drawing():
        figure, axes = _axes(1.7)
        _curve(axes, intervals, "compression_error", "-o")
        highest = max(filter(math.isfinite, errors), default=0.0)
        axes.set(xlabel="optimizer step", ylabel="compression error", ylim=(0, 1.2 * highest or 1))
        _whole_numbers(axes.xaxis)
        return svg(figure, "error", "Compression error", f"From {errors[0]:.3g} to {errors[-1]:.3g}.")


def kinds_chart(kinds: Sequence[tuple[str, float]], dense_mb: float) -> str:
    """What is sent in a step, against plain DDP."""
    if not kinds:
        return ""
    with drawing():
        figure, axes = _axes(1.75)
        left = 0.0
        for kind, sent_mb in kinds:
            if sent_mb:
                axes.barh(["sent"], [sent_mb], left=left, height=0.6, label=LOOKS[kind].label, **LOOKS[kind].bar)
                left += sent_mb
        axes.barh(["plain DDP"], [dense_mb], height=0.6, **LOOKS["dense"].bar)
        for row, total in enumerate((left, dense_mb)):
            _beside(axes, total, row, f"{total:.3g}")
        axes.set(xlabel="MB a step and rank", xlim=(0, 1.13 * max(left, dense_mb)))
        axes.invert_yaxis()
        _legend(axes, columns=2)
        text = f"A rank sends {left:.3g} MB a step; plain DDP would send {dense_mb:.3g}."
        return svg(figure, "kinds", "Bytes by kind", text)


def groups_chart(groups: Sequence[GroupTraffic]) -> str:
    """What is sent for each part of the model."""
    shown = sorted((g for g in groups if g.dense_mb), key=lambda g: -g.dense_mb)[:_MOST_GROUPS]
    if not shown:
        return ""
    with drawing():
        figure, axes = _axes(0.7 + 0.46 * len(shown))
        rows = range(len(shown))
        axes.barh([r - 0.2 for r in rows], [g.dense_mb for g in shown], 0.36, label="plain DDP", **LOOKS["dense"].bar)
        look = LOOKS["payload"]
        axes.barh([r + 0.2 for r in rows], [g.sent_mb for g in shown], 0.36, label="sent", **look.bar)
        for row, group in zip(rows, shown, strict=True):
            _beside(axes, group.sent_mb, row + 0.2, f"ratio {group.ratio:.2f}" if group.ratio else "")
        axes.set(xlabel="MB a step and rank", xlim=(0, 1.25 * max(max(g.dense_mb, g.sent_mb) for g in shown)))
        axes.set_yticks(list(rows), [_short(g.name) for g in shown])
        axes.invert_yaxis()
        _legend(axes)
        return svg(figure, "groups", "Bytes by part of the model", f"Most travels for {shown[0].name}.")


def ranks_chart(ranks: Sequence[RankTimes]) -> str:
    """How long each rank computes, communicates and waits."""
    if not ranks:
        return ""
    slowest = sorted(range(len(ranks)), key=lambda rank: -ranks[rank].compute_ms)
    shown = sorted(slowest[:MOST_RANKS])
    with drawing():
        figure, axes = _axes(0.8 + 0.32 * len(shown))
        left = [0.0] * len(shown)
        for part in _PARTS:
            times = [getattr(ranks[rank], f"{part}_ms") for rank in shown]
            axes.barh(range(len(shown)), times, 0.7, left, label=LOOKS[part].label, **LOOKS[part].bar)
            left = [before + time for before, time in zip(left, times, strict=True)]
        for row, rank in enumerate(shown):
            _beside(axes, left[row], row, f"{ranks[rank].compute_ms:.3g}")
        axes.set_yticks(range(len(shown)), [f"rank {rank}" for rank in shown])
        axes.set(xlabel="ms a step (figure: compute)", xlim=(0, 1.13 * max(left)))
        axes.invert_yaxis()
        _legend(axes)
        most = slowest[0]
        text = f"Rank {most} computes longest: {ranks[most].compute_ms:.3g} ms a step."
        return svg(figure, "ranks", "Compute, communication and waiting by rank", text)


def runs_chart(runs: Sequence[tuple[str, StepAverages]]) -> str:
    """How long runs compute, communicate and wait in a step."""
    shown = [(name, averages) for name, averages in runs if averages.step_ms is not None]
    if not shown:
        return ""
    with drawing():
        figure, axes = _axes(0.8 + 0.4 * len(shown))
        left = [0.0] * len(shown)
        for part in _PARTS:
            times = [getattr(averages, f"{part}_ms") or 0.0 for _, averages in shown]
            axes.barh(range(len(shown)), times, 0.7, left, label=LOOKS[part].label, **LOOKS[part].bar)
            left = [before + time for before, time in zip(left, times, strict=True)]
        for row, total in enumerate(left):
            _beside(axes, total, row, f"{total:.3g}")
        axes.set_yticks(range(len(shown)), [_short(name) for name, _ in shown])
        axes.set(xlabel="ms a step", xlim=(0, 1.13 * max(left) or 1))
        axes.invert_yaxis()
        _legend(axes)
        text = "; ".join(f"{name}: {total:.3g} ms" for (name, _), total in zip(shown, left, strict=True))
        return svg(figure, "runs", "Step time of each run", text)


def losses_chart(runs: Sequence[tuple[str, Sequence[Interval]]]) -> str:
    """Training loss of runs."""
    shown = [(name, intervals) for name, intervals in runs if any(i.loss is not None for i in intervals)]
    if not shown:
        return ""
    with drawing():
        figure, axes = _axes(2.7)
        for i, (name, intervals) in enumerate(shown):
            _curve(axes, intervals, "loss", f"{_LINES[i % len(_LINES)]}{_MARKS[i % len(_MARKS)]}", label=_short(name))
        axes.set(xlabel="optimizer step", ylabel="training loss")
        _whole_numbers(axes.xaxis)
        _legend(axes)
        return svg(figure, "losses", "Training loss of each run", ", ".join(name for name, _ in shown))


def _axes(height: float) -> tuple[Any, Any]:
    figure, (axes,) = _rows(height, 1)
    return figure, axes


def _rows(height: float, rows: int) -> tuple[Any, list[Any]]:
    """Return a figure and its axes, one above the other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, list(figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0])


def _curve(axes: Any, intervals: Sequence[Interval], name: str, style: str, label: str = "") -> None:
    """Draw a value at the end of each interval, with a gap where there is none."""
    values = [getattr(interval, name) for interval in intervals]
    points = [float("nan") if value is None else value for value in values]
    few = len(points) <= 40
    style = style if few else style.rstrip(_MARKS)
    axes.plot([i.last_step for i in intervals], points, style, color=INK, markersize=3.5, label=label)


def _beside(axes: Any, x: float, y: float, text: str) -> None:
    """Write at the end of a horizontal bar."""
    axes.annotate(text, (x, y), (4, 0), textcoords="offset points", va="center")


def _legend(axes: Any, columns: int = 3) -> None:
    """Put the legend above the axes."""
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns, borderaxespad=0.2)


def _whole_numbers(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def _short(name: str) -> str:
    return name if len(name) <= 22 else f"…{name[-21:]}"
