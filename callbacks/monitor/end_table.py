"""The table at the end of a fit."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import NamedTuple

from lightning_commopt.callbacks.monitor.averages import WARM_UP_STEPS
from lightning_commopt.callbacks.monitor.summary import CommSummary

__all__ = ["Row", "plain_table", "print_table", "rows"]

_WARM_UP = f"not measured: the first {WARM_UP_STEPS} steps are warm-up"


class Row(NamedTuple):
    """One line: what was measured, its value, and its unit with remarks."""

    label: str
    value: str
    remark: str = ""


def title(summary: CommSummary) -> str:
    """Say what was averaged."""
    if not summary.measured_steps:
        return "CommMonitor"
    if summary.left_out_steps:
        recorded = f"{summary.left_out_steps} recorded ones left out"
        return f"CommMonitor: averages over {summary.measured_steps} of {summary.steps} steps, {recorded}"
    return f"CommMonitor: averages over the last {summary.measured_steps} of {summary.steps} steps"


def rows(summary: CommSummary) -> list[Row]:
    """Lay out a summary."""
    return [*_what(summary), *_times(summary), *_bytes(summary), *_host(summary), *_result(summary)]


def print_table(summary: CommSummary) -> None:
    """Print to standard output, with rich where it is installed."""
    if find_spec("rich") is None:
        print(plain_table(summary))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title(summary), title_justify="left", box=box.ROUNDED, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for row in rows(summary):
        table.add_row(*row)
    console = Console(markup=False, highlight=False)
    console.print(table)
    console.print(summary.advice.sentence)


def plain_table(summary: CommSummary) -> str:
    """Lay out the table with blanks alone."""
    lines = rows(summary)
    left, middle = (max(len(row[column]) for row in lines) for column in (0, 1))
    body = [f"  {row.label:<{left}}  {row.value:>{middle}}  {row.remark}".rstrip() for row in lines]
    return "\n".join([title(summary), *body, summary.advice.sentence])


def _what(summary: CommSummary) -> Iterator[Row]:
    several = summary.world_size > 1
    ranks = f"on {summary.world_size} ranks" if several else "one process: there is nothing to exchange"
    yield Row("method", summary.method, ranks)
    skipped = summary.skipped_steps
    if skipped is None:
        remark = "applied and skipped ones are not told apart"
    else:
        remark = f"{summary.steps - skipped} applied, {skipped} skipped" if skipped else "all applied"
    yield Row("steps", str(summary.steps), remark)


def _times(summary: CommSummary) -> Iterator[Row]:
    rate = summary.samples_per_s
    if rate is None and summary.measured_steps:
        yield Row("throughput", "-", "samples/s not measured: the size of a batch is not known")
    else:
        yield Row("throughput", _number(rate), "samples/s" if rate is not None else _WARM_UP)
    yield Row("step", _number(summary.step_ms), "ms" if summary.step_ms is not None else _WARM_UP)
    if summary.world_size == 1 or summary.step_ms is None:
        return
    for label, name in (
        ("compute", "compute_ms"),
        ("exposed communication", "exposed_comm_ms"),
        ("waiting", "waiting_ms"),
    ):
        yield Row(f"  {label}", _number(getattr(summary, name)), f"ms, {_share(summary, name)}")
    if summary.transfer_ms:
        hidden = (
            "" if summary.overlap_ratio is None else f"; {100 * summary.overlap_ratio:.0f} % of the exchange hidden"
        )
        yield Row("transfer", _number(summary.transfer_ms), f"ms a step{hidden}")


def _share(summary: CommSummary, name: str) -> str:
    """Put a time in relation to the step, and to the rank where it is longest."""
    assert summary.step_ms is not None
    by_rank = [getattr(times, name) for times in summary.by_rank]
    most = max(by_rank)
    share = f"{100 * getattr(summary, name) / summary.step_ms:.0f} %"
    return f"{share}; highest on rank {by_rank.index(most)}: {_number(most)}"


def _bytes(summary: CommSummary) -> Iterator[Row]:
    if summary.world_size == 1:
        return
    measured = summary.measured_steps > 0
    dense = f"plain DDP {_number(summary.dense_mb_per_step)}"
    inside = summary.sent_inside_node_mb_per_step
    if summary.sent_mb_per_step is not None:
        of_it = f", {_number(inside)} of it inside a node" if inside else ""
        yield Row("sent", _number(summary.sent_mb_per_step), f"MB a step and rank{of_it}; {dense}")
    else:
        yield Row("sent", "-", f"not counted: a hook of DDP encodes; {dense} MB" if measured else _WARM_UP)
    yield Row(
        "compression ratio",
        _number(summary.compression_ratio),
        f"bytes of plain DDP over bytes sent{' between nodes' if inside else ''}",
    )
    yield Row("compression error", _number(summary.compression_error), _about_error(summary))
    yield Row("extra memory", _number(summary.memory_mb), "MB a rank")


def _host(summary: CommSummary) -> Iterator[Row]:
    if summary.gpu_busy_ratio is not None:
        memory = "" if summary.gpu_memory_mb is None else f"; {_number(summary.gpu_memory_mb)} MB in use"
        yield Row("GPU busy", f"{100 * summary.gpu_busy_ratio:.0f} %", f"of the time, mean over ranks{memory}")
    if (summary.host_network_sent_mb_per_step or 0.0) >= 0.01:
        yield Row(
            "network cards", _number(summary.host_network_sent_mb_per_step), "MB a step sent by rank 0's whole host"
        )


def _about_error(summary: CommSummary) -> str:
    if summary.compression_error is not None:
        return "|residual| / |input|, worst bucket"
    return "not sampled" + ": nothing is compressed" * (summary.compression_ratio == 1)


def _result(summary: CommSummary) -> Iterator[Row]:
    if summary.validation is not None:
        name, value = summary.validation
        yield Row(name, f"{value:.4f}", "last validation")
    if summary.replicas_equal:
        yield Row("replicas equal", "yes", "every bit of every parameter")
    elif summary.first_difference is not None:
        name, ranks = summary.first_difference
        where = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:4]))}{', ...' * (len(ranks) > 4)}"
        yield Row("replicas equal", "NO", f"`{name}` on {where} differs from rank 0")


def _number(value: float | None) -> str:
    """Three significant digits, without an exponent where it can be avoided."""
    if value is None:
        return "-"
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:#.3g}" if value else "0"
