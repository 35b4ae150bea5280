"""What a run says: a row a mode, as Markdown and as a plot."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median, quantiles

from benchmarks.links.bound import Link, shortest_step_ms
from benchmarks.links.record import Run, Series
from lightning_commopt.demo.network import bits_per_second
from lightning_commopt.tuning import ComputeProfile

__all__ = ["Row", "markdown", "plot", "rows"]

BASE, FLOOR = "ddp", "nosync"
_LAST = 10
"""Steps over which the loss at the end is averaged."""


@dataclass(frozen=True)
class Row:
    """One mode of a run.

    Args:
        mode: Its word.
        median_ms: Of a step.
        min_ms: Of a step.
        speed_up: Of DDP's defaults over this mode, quartiles: of the ratios step by step where modes were interleaved,
            else of the ratios of DDP's median to each step. None where DDP was not measured.
        efficiency: Shortest possible step (:func:`~benchmarks.links.bound.shortest_step_ms`) over the median.
        exposed_ms: Median of a step's excess over the same step without exchange.
        codec_ms: Median CPU time of the thread that encodes and decodes; None where there is none.
        bytes_per_parameter: Sent by a rank a step, by the interface's counter.
        overhead: Bytes sent over bytes promised; None where nothing is promised.
        loss: Mean of the last steps.
        replicas_equal: Whether all ranks ended with the same bits.

    """

    mode: str
    median_ms: float
    min_ms: float
    speed_up: tuple[float, float, float] | None
    efficiency: float | None
    exposed_ms: float | None
    codec_ms: float | None
    bytes_per_parameter: float
    overhead: float | None
    loss: float
    replicas_equal: bool | None


def rows(run: Run) -> list[Row]:
    """Return a row for each mode of a run."""
    return [_row(run, mode, series) for mode, series in run.series.items()]


def _row(run: Run, mode: str, series: Series) -> Row:
    base, floor = run.series.get(BASE), run.series.get(FLOOR)
    step, sent = median(series.step_ms), fmean(series.tx_bytes)
    exposed = None
    if floor is not None:
        pairs = _pairs(run, floor, series)
        exposed = median(mine - other for other, mine in pairs)
    return Row(
        mode=mode,
        median_ms=step,
        min_ms=min(series.step_ms),
        speed_up=None if base is None else _quartiles([other / mine for other, mine in _pairs(run, base, series)]),
        efficiency=None if floor is None or not floor.forward_ms else _bound_ms(run, floor, series) / step,
        exposed_ms=exposed,
        codec_ms=median(series.codec_ms) if any(series.codec_ms) else None,
        bytes_per_parameter=sent / run.parameters,
        overhead=sent / series.promised_bytes if series.promised_bytes else None,
        loss=fmean(series.losses[-_LAST:]),
        replicas_equal=series.replicas_equal,
    )


def _pairs(run: Run, other: Series, mine: Series) -> list[tuple[float, float]]:
    """Return the steps of two modes side by side; under Lightning, each step against the other's median."""
    if run.lightning:
        return [(median(other.step_ms), ms) for ms in mine.step_ms]
    return list(zip(other.step_ms, mine.step_ms, strict=True))


def _bound_ms(run: Run, floor: Series, series: Series) -> float:
    compute = ComputeProfile(median(floor.forward_ms), median(floor.backward_ms), median(floor.optimizer_ms), run.ready)
    link = Link(bits_per_second(run.rate), run.latency_ms)
    codec_ms = median(series.codec_ms)
    return shortest_step_ms(compute, link, fmean(series.tx_bytes), series.bucket_numels, series.hops, codec_ms)


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return low, middle, high


def markdown(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a heading, a line on the machine and a table for each run."""
    for run in runs:
        steps = len(next(iter(run.series.values())).step_ms)
        kept = "one launch a mode" if run.lightning else "interleaved step by step"
        yield f"### {run.title}"
        yield ""
        yield f"{steps} steps of each mode after {run.warm_up}, {kept}; {', '.join(_words(run))}."
        yield ""
        yield (
            "| mode | ms a step | min | speed-up over ddp [quartiles] | efficiency | exposed ms | codec CPU ms "
            "| bytes/parameter | sent/promised | loss | replicas |"
        )
        yield "|---|---|---|---|---|---|---|---|---|---|---|"
        yield from map(_line, rows(run))
        yield ""


def _words(run: Run) -> Iterator[str]:
    """Describe the machine."""
    for key, value in run.machine.items():
        yield value if key in ("processor", "kernel", "date") else f"{key} {value}"
    if run.latency_ms:
        yield f"latency {run.latency_ms:.2f} ms"


def _line(row: Row) -> str:
    speed_up = "" if row.speed_up is None else "{1:.2f} [{0:.2f}, {2:.2f}]".format(*row.speed_up)
    equal = {None: "", True: "equal", False: "differ"}[row.replicas_equal]
    cells = [
        row.mode,
        f"{row.median_ms:.1f}",
        f"{row.min_ms:.1f}",
        speed_up,
        _number(row.efficiency, 2),
        _number(row.exposed_ms, 1),
        _number(row.codec_ms, 1),
        f"{row.bytes_per_parameter:.3f}",
        _number(row.overhead, 3),
        f"{row.loss:.4f}",
        equal,
    ]
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def plot(runs: Sequence[Run], path: Path) -> None:
    """Draw the speed-up of each mode, a panel a run, where matplotlib is installed."""
    if find_spec("matplotlib") is None:
        print("No plot: `pip install lightning-commopt[report]` brings matplotlib.")
        return
    from matplotlib import pyplot

    panels = [(run, shown) for run in runs if (shown := [row for row in rows(run) if row.speed_up is not None])]
    if not panels:
        return
    height = 1.2 + 0.3 * max(len(shown) for _, shown in panels)
    figure, grid = pyplot.subplots(
        1, len(panels), figsize=(2 + 3.6 * len(panels), height), squeeze=False, layout="constrained"
    )
    for axes, (run, shown) in zip(grid[0], panels, strict=True):
        for place, row in enumerate(reversed(shown)):
            assert row.speed_up is not None
            low, middle, high = row.speed_up
            ours = row.mode not in (BASE, FLOOR) and not row.mode.startswith(("ddp_", "torch_"))
            axes.barh(place, middle, color="tab:blue" if ours else "lightgray")
            axes.errorbar(middle, place, xerr=[[middle - low], [high - middle]], color="black", capsize=2)
            axes.annotate(f" {middle:.2f}", (high, place), va="center", fontsize=8)
        axes.set_yticks(range(len(shown)), [row.mode for row in reversed(shown)])
        axes.axvline(1, color="black", linewidth=0.8)
        axes.margins(x=0.15)
        axes.set(title=run.title, xlabel="speed-up over DDP's defaults")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
