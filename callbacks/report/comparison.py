"""Several runs side by side."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_commopt.callbacks.monitor.summary import CommSummary
from lightning_commopt.callbacks.report.charts import losses_chart, runs_chart
from lightning_commopt.callbacks.report.content import ReportContent
from lightning_commopt.callbacks.report.page import environment_of_templates

__all__ = ["ComparedRow", "NamedRun", "compared", "names_of", "render_comparison"]


class NamedRun(NamedTuple):
    """A run, and what to call it."""

    name: str
    content: ReportContent


class ComparedRow(NamedTuple):
    """One quantity of all runs.

    Args:
        label: What it is, with its unit.
        values: Of each run; None where it was not measured.
        ratios: To the first run; None where there is none.

    """

    label: str
    values: tuple[float | str | None, ...]
    ratios: tuple[float | None, ...]


_ROWS: tuple[tuple[str, Callable[[CommSummary], float | str | None]], ...] = (
    ("method", lambda s: s.method),
    ("ranks", lambda s: s.world_size),
    ("optimizer steps", lambda s: s.steps),
    ("throughput, samples/s", lambda s: s.samples_per_s),
    ("step, ms", lambda s: s.step_ms),
    ("compute, ms", lambda s: s.compute_ms),
    ("exposed communication, ms", lambda s: s.exposed_comm_ms),
    ("waiting, ms", lambda s: s.waiting_ms),
    ("transfer, ms a step", lambda s: s.transfer_ms),
    ("sent, MB a step and rank", lambda s: s.sent_mb_per_step),
    ("plain DDP, MB a step and rank", lambda s: s.dense_mb_per_step),
    ("compression error", lambda s: s.compression_error),
    ("extra memory, MB a rank", lambda s: s.memory_mb),
    ("validation loss", lambda s: None if s.validation is None else s.validation[1]),
    ("replicas equal", lambda s: {None: None, True: "yes", False: "NO"}[s.replicas_equal]),
    ("bound by", lambda s: s.advice.bound_by),
)


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return as much of each path's end as tells it from the others."""
    parts = [path.resolve().with_suffix("").parts for path in paths]
    for depth in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(one[-depth:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{path} ({i})" for i, path in enumerate(paths, 1)]


def compared(runs: Sequence[NamedRun]) -> list[ComparedRow]:
    """Return what was measured in any run, beside what it was in the others."""
    found = []
    for label, value_of in _ROWS:
        values = tuple(value_of(run.content.summary) for run in runs)
        if any(value is not None for value in values):
            found.append(ComparedRow(label, values, tuple(_ratio(value, values[0]) for value in values)))
    return found


def render_comparison(runs: Sequence[NamedRun]) -> str:
    """Return a page that puts runs side by side; the first is what the others are compared with."""
    return (
        environment_of_templates()
        .get_template("comparison.html")
        .render(
            runs=runs,
            rows=compared(runs),
            split=runs_chart([(run.name, run.content.summary) for run in runs]),
            losses=losses_chart([(run.name, run.content.intervals) for run in runs]),
            differing=_differing([dict(run.content.environment) for run in runs]),
        )
    )


def _ratio(value: Any, first: Any) -> float | None:
    numbers = all(isinstance(v, (int, float)) and math.isfinite(v) for v in (value, first))
    return value / first if numbers and first else None


def _differing(environments: Sequence[dict[str, str]]) -> list[tuple[str, list[str]]]:
    """Return what is not the same in all environments."""
    names = dict.fromkeys(name for environment in environments for name in environment)
    rows = [(name, [environment.get(name, "") for environment in environments]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1 and name != "finished"]
