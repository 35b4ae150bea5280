"""``commopt report``."""

from pathlib import Path

from lightning_commopt.callbacks.report import (
    NamedRun,
    RunFileError,
    check_can_report,
    compared,
    names_of,
    read_run,
    render,
    render_comparison,
    run_files,
    write_atomically,
)
from lightning_commopt.cli.errors import UsageError
from lightning_commopt.cli.output import Answer, Table

__all__ = ["report", "runs_table"]


def report(runs: list[str], out: str = "commopt-report.html") -> Answer:
    """What did a run spend its time on, and how do several runs differ?

    Makes a page of HTML from what CommMonitor(report="run.json") wrote (report="report.html" writes report.json beside
    its page). Several runs are put side by side; the first is what the others are compared with.

        commopt report run.json
        commopt report ddp.json int8.json --out compared.html
        commopt report runs/

    Args:
        runs: Files that CommMonitor wrote, or folders of such files.
        out: The page to write.

    """
    page = Path(out)
    try:
        if page.suffix == ".json":
            raise UsageError(f"`--out {out}` is the name of a run: name a page, such as `{page.with_suffix('.html')}`.")
        check_can_report(page)
        files = [file for run in runs for file in run_files(Path(run))]
        named = [NamedRun(name, read_run(file)) for name, file in zip(names_of(files), files, strict=True)]
        write_atomically(page, render(named[0].content) if len(named) == 1 else render_comparison(named))
    except (RunFileError, ModuleNotFoundError, ValueError) as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"`{out}` cannot be written: {error.strerror}: name another page by `--out`.") from None
    verdicts = [f"{name}: {content.summary.advice.sentence}" for name, content in named]
    return Answer(
        {
            "page": page.resolve(),
            "runs": [
                {"name": name, "file": file, "summary": content.summary, "advice": content.summary.advice._asdict()}
                for (name, content), file in zip(named, files, strict=True)
            ],
        },
        [runs_table(named), *verdicts, f"The page is {page.resolve()}"],
    )


def runs_table(runs: list[NamedRun]) -> Table:
    """Lay out runs side by side, with factors of the first."""
    rows = compared(runs)
    columns = ["", *(run.name for run in runs)]
    return Table("CommMonitor", columns, [[row.label, *map(_cell, row.values, row.ratios)] for row in rows])


def _cell(value: float | str | None, ratio: float | None) -> str:
    if value is None:
        return "-"
    word = f"{value:.4g}" if isinstance(value, float) else str(value)
    return word if ratio is None or ratio == 1 or isinstance(value, int) else f"{word} ({ratio:.2g}x)"
