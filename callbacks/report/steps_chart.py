"""The time line of a few steps."""

from collections.abc import Sequence
from typing import Any

from lightning_commopt.callbacks.report.content import RecordedSteps
from lightning_commopt.callbacks.report.drawing import INK, LOOKS, drawing, svg
from lightning_commopt.measure import Span

__all__ = ["MOST_RANKS", "steps_chart"]

_MAIN = ("forward", "backward", "exposed", "optimizer")
_TRAVEL, _CODEC = ("wait", "transfer"), ("encode", "decode")
MOST_RANKS = 12
_MOST_EDGES = 250  # pieces in a row; the edges of more would hide them


def steps_chart(recorded: RecordedSteps, width: float, name: str) -> str:
    """Two rows a rank: what computes, and under it the exchange of each bucket.

    Args:
        recorded: The steps.
        width: Of the chart, in inches.
        name: Makes identifiers unique in the page.

    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    numbers = _drawn(recorded)
    ranks = [recorded.ranks[rank] for rank in numbers]
    with drawing():
        figure = Figure(figsize=(width, 0.9 + 0.8 * len(ranks)), layout="constrained")
        axes = figure.subplots()
        total_ms = max(span.end_ms for spans in ranks for span in spans)
        for row, spans in enumerate(ranks):
            _bars(axes, spans, _MAIN, row)
            _bars(axes, spans, _TRAVEL, row + 0.4)
            _bars(axes, spans, _CODEC, row + 0.4, height=0.26)  # may lie within the travel of another bucket
            _numbers(axes, spans, row + 0.61, apart_ms=0.2 / width * total_ms)
        for step in (span for span in ranks[0] if span.phase == "step"):
            axes.axvline(step.end_ms, color=INK, linewidth=0.8, linestyle=":")
        axes.set(xlabel="ms", xlim=(0, total_ms), ylim=(len(ranks) - 0.1, -0.3))
        axes.set_yticks([row + 0.2 for row in range(len(ranks))], [f"rank {rank}" for rank in numbers])
        axes.tick_params(axis="y", length=0)
        phases = [
            phase for phase in _MAIN + _TRAVEL + _CODEC if any(s.phase == phase for spans in ranks for s in spans)
        ]
        handles = [Patch(label=LOOKS[phase].label, **LOOKS[phase].bar) for phase in phases]
        columns = 8 if width > 6 else 4
        axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns, borderaxespad=0.2)
        text = (
            "Upper row of a rank: forward, backward with its exposed end, optimizer. Lower row: encode, wait, transfer "
            "and decode of each bucket, with the bucket's number. The table below has the averages."
        )
        return svg(figure, name, f"Time line of {recorded.steps} step(s) on {len(ranks)} ranks", text)


def _drawn(recorded: RecordedSteps) -> list[int]:
    """Return the ranks to draw: where there are too many, those that compute longest and shortest."""
    ranks = range(len(recorded.ranks))
    if len(ranks) <= MOST_RANKS:
        return list(ranks)
    busy = [sum(s.end_ms - s.start_ms for s in spans if s.phase == "forward") for spans in recorded.ranks]
    order = sorted(ranks, key=lambda rank: busy[rank])
    return sorted(order[: MOST_RANKS // 2] + order[-MOST_RANKS // 2 :])


def _bars(axes: Any, spans: Sequence[Span], phases: Sequence[str], row: float, height: float = 0.38) -> None:
    shown = [span for span in spans if span.phase in phases]
    edge = {"linewidth": 0.25 if len(shown) <= _MOST_EDGES else 0.0}
    for phase in phases:
        pieces = [(s.start_ms, s.end_ms - s.start_ms) for s in shown if s.phase == phase]
        if pieces:
            axes.broken_barh(pieces, (row - height / 2, height), **(LOOKS[phase].bar | edge))


def _numbers(axes: Any, spans: Sequence[Span], row: float, apart_ms: float) -> None:
    """Write each bucket's number below the beginning of its exchange, where there is room."""
    bucket, free_ms = None, 0.0
    for span in sorted((s for s in spans if s.bucket is not None), key=lambda s: s.start_ms):
        begins, bucket = span.bucket != bucket, span.bucket
        if begins and span.start_ms >= free_ms:
            axes.text(span.start_ms, row, str(bucket), va="top", fontsize=8)
            free_ms = span.start_ms + apart_ms
