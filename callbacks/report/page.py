"""The page of a report: one file with everything in it."""

from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_commopt.callbacks.monitor.averages import RankTimes
from lightning_commopt.callbacks.monitor.end_table import rows
from lightning_commopt.callbacks.monitor.summary import CommSummary
from lightning_commopt.callbacks.report import charts
from lightning_commopt.callbacks.report.content import BucketTimes, ReportContent
from lightning_commopt.callbacks.report.drawing import LOOKS
from lightning_commopt.callbacks.report.history import Interval
from lightning_commopt.callbacks.report.run_file import write_atomically, write_run
from lightning_commopt.callbacks.report.steps_chart import MOST_RANKS, steps_chart

if TYPE_CHECKING:
    import jinja2

__all__ = ["check_can_report", "environment_of_templates", "render", "write"]

_NARROW, _WIDE = 4.8, 10.2  # inches of the time line on a phone and on a screen


def check_can_report(path: Path) -> None:
    """Check before a run what would fail at its end.

    Raises:
        ModuleNotFoundError: A library that draws is missing.
        ValueError: The path is a folder.

    """
    missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if missing and path.suffix != ".json":
        raise ModuleNotFoundError(
            f"`report=...` needs `{missing[0]}`, which is not installed: pip install 'lightning-commopt[report]'. "
            "A file that ends in `.json` needs nothing: `commopt report` makes the page from it elsewhere."
        )
    if path.is_dir():
        raise ValueError(f"`report={str(path)!r}` is a folder: name a file, such as `{path / 'commopt-report.html'}`.")


def write(path: Path, content: ReportContent) -> None:
    """Write a report, the whole file at once, and the run that it was made from beside it.

    Args:
        path: The page; the run is ``report.json`` beside ``report.html``. A path that ends so gets the run alone.
        content: What to write.

    """
    write_run(path.with_suffix(".json"), content)
    if path.suffix != ".json":
        write_atomically(path, render(content))


def render(content: ReportContent) -> str:
    """Return the page as HTML."""
    summary, recorded = content.summary, content.recorded
    page: str = (
        environment_of_templates()
        .get_template("page.html")
        .render(
            verdict=summary.advice,
            summary=summary,
            table=rows(summary),
            values=_values(summary),
            content=content,
            most_ranks=charts.MOST_RANKS,
            most_recorded=MOST_RANKS,
            ranks=list(enumerate(summary.by_rank)),
            rank_fields=[field.name for field in fields(RankTimes)],
            interval_fields=[field.name for field in fields(Interval)],
            buckets=recorded.buckets() if recorded is not None else [],
            bucket_fields=[field.name for field in fields(BucketTimes)],
            labels={kind: look.label for kind, look in LOOKS.items()},
            charts=_charts(content),
        )
    )
    return page


def environment_of_templates() -> "jinja2.Environment":
    """Return what renders the pages of this folder."""
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    templates.filters["number"] = number
    return templates


def number(value: Any) -> str:
    """Write a value for people: four significant digits."""
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _charts(content: ReportContent) -> dict[str, str]:
    summary, recorded = content.summary, content.recorded
    dense_mb = summary.dense_mb_per_step or 0.0
    return {
        "split": charts.split_chart(content.intervals),
        "loss": charts.loss_chart(content.intervals),
        "error": charts.error_chart(content.intervals),
        "kinds": charts.kinds_chart(content.kinds, dense_mb),
        "groups": charts.groups_chart(content.groups),
        "ranks": charts.ranks_chart(summary.by_rank if summary.world_size > 1 else ()),
        "steps_wide": "" if recorded is None else steps_chart(recorded, _WIDE, "steps-wide"),
        "steps_narrow": "" if recorded is None else steps_chart(recorded.only_last(), _NARROW, "steps-narrow"),
    }


def _values(summary: CommSummary) -> list[tuple[str, Any]]:
    """Every number and word of a summary by its name, as far as it was measured."""
    named = ((field.name, getattr(summary, field.name)) for field in fields(summary))
    return [(name, value) for name, value in named if isinstance(value, int | float | str)]
