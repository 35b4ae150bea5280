"""Ranks layouts and methods, and says what would help where nothing fits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil

from lightning_commopt.planning.cluster import Cluster
from lightning_commopt.planning.job import Model, Training
from lightning_commopt.planning.layouts import layouts
from lightning_commopt.planning.rows import COMFORTABLE, FITS, Row, rows_of

__all__ = ["Ranking", "plan", "remedies"]

_TIE = 1.10  # predictions closer than this are no reason for a more complicated strategy
_SIMPLEST = ("data", "hsdp", "pipeline", "tensor", "zero")
_NEAR_BEST = 1.10  # as `auto` has it: a milder method may take this much longer than the fastest


@dataclass(frozen=True)
class Ranking:
    """What can be done.

    Args:
        best: Of each layout the row with the mildest method that is about as fast as any, best first; those that do not
            fit last.
        rows: All of them, by layout, mildest method first.
        data_parallel: Whether a copy takes at most 80 % of one device, so that data parallel comes first.

    """

    best: tuple[Row, ...]
    rows: tuple[Row, ...]
    data_parallel: bool

    @property
    def feasible(self) -> bool:
        """Whether anything fits."""
        return any(row.fits for row in self.best)

    def beside(self, row: Row) -> list[Row]:
        """Return the rows of the same layout, mildest method first."""
        return [other for other in self.rows if other.layout == row.layout]


def plan(model: Model, training: Training, cluster: Cluster, allow: Sequence[str] = ()) -> Ranking:
    """Predict every layout with every method, and rank them.

    Args:
        model: To be trained.
        training: How.
        cluster: Where.
        allow: Methods of loss-safety class C that may be recommended.

    """
    found, best = [], []
    for layout in layouts(model, cluster):
        rows = rows_of(model, training, cluster, layout)
        found += rows
        if rows:
            best.append(_mildest(rows, allow))
    data_parallel = any(row.layout.kind == "data" and row.memory.total <= COMFORTABLE * cluster.memory for row in found)

    fastest = min((row.step_ms for row in best if row.fits), default=0.0)

    def order(row: Row) -> tuple[float, ...]:
        if not row.fits:
            return 1, row.memory.total
        tied = row.step_ms <= _TIE * fastest
        simple = _SIMPLEST.index(row.layout.kind) if tied else len(_SIMPLEST)
        return 0, data_parallel and row.layout.kind != "data", simple, row.step_ms

    return Ranking(tuple(sorted(best, key=order)), tuple(found), data_parallel)


def _mildest(rows: Sequence[Row], allow: Sequence[str]) -> Row:
    """Return the mildest that is near the best of what fits; the one that needs least memory where nothing does."""
    allowed = [row for row in rows if row.safety != "C" or row.method in allow]
    fitting = [row for row in allowed if row.fits]
    if not fitting:
        return min(allowed, key=lambda row: row.memory.total)
    fastest = min(row.step_ms for row in fitting)
    return next(row for row in fitting if row.step_ms <= _NEAR_BEST * fastest)


def remedies(model: Model, training: Training, cluster: Cluster, ranking: Ranking) -> Iterator[str]:
    """Yield what would make something fit, each by itself.

    Args:
        model: To be trained.
        training: How.
        cluster: Where.
        ranking: In which nothing fits.

    """
    if not ranking.best:
        yield (
            f"a global batch that ranks can share evenly: {training.global_batch} samples cannot be divided among "
            f"{cluster.devices} devices in any layout; try {cluster.devices}"
        )
        return
    least = min(ranking.best, key=lambda row: row.memory.total)
    yield (
        f"devices with {ceil(least.memory.total / FITS / 1e9)} GB: {least.layout} needs {least.memory.total / 1e9:.1f} "
        f"GB, and {FITS:.0%} of {cluster.memory / 1e9:.0f} GB is there"
    )

    def helps(words: str, training: Training, cluster: Cluster) -> Iterator[str]:
        fitting = [row for row in plan(model, training, cluster).best if row.fits]
        if fitting:
            yield f"{words}: {fitting[0].layout} then needs {fitting[0].memory.total / 1e9:.1f} GB"

    if not training.checkpointing and training.activation_bytes is None:
        yield from helps("activation checkpointing (`--checkpointing`)", replace(training, checkpointing=True), cluster)
    if training.precision != "bf16-true":
        yield from helps("`--precision bf16-true`", replace(training, precision="bf16-true"), cluster)
    ways = [(training, "")]
    if not training.checkpointing:
        ways.append((replace(training, checkpointing=True), " with `--checkpointing`"))
    for (way, how), doublings in product(ways, range(1, 11)):
        try:
            more = replace(cluster, devices=cluster.devices << doublings)
            batch = max(training.global_batch, more.devices)
            larger = f" and a global batch of {batch}" if batch > training.global_batch else ""
            found = list(helps(f"{more.devices} devices{how}{larger}", replace(way, global_batch=batch), more))
        except ValueError:
            continue
        if found:
            yield found[0]
            return
