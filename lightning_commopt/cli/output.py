"""How an answer is shown: tables and sentences for people, one JSON object for programs."""

import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["Answer", "Table", "print_answer", "stdout_to_stderr"]

_PIPE_WIDTH = 1000
"""A file or a pipe has no width: no cell is broken there."""


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows under headings. A column of numbers is aligned to the right.

    Args:
        title: Printed above it.
        columns: The headings.
        rows: As many words each as there are headings.

    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a command has to say.

    Args:
        data: Printed with ``--json``: numbers, words, lists, mappings, dataclasses and paths. Numbers that are not
            finite become null.
        shown: Printed otherwise, one after the other; words as they are.
        code: Exit code: 0 done, 1 something was found or nothing is feasible.

    """

    data: Mapping[str, object]
    shown: Sequence[Table | str]
    code: int = 0


def print_answer(answer: Answer, as_json: bool) -> None:
    """Print to standard output, with rich where it is installed."""
    if as_json:
        print(json.dumps(_plain(answer.data), indent=2))
        return
    for part in answer.shown:
        if isinstance(part, str):
            print(part)
        elif find_spec("rich") is None:
            print(plain_table(part))
        else:
            _print_rich(part)


def plain_table(table: Table) -> str:
    """Lay out a table with blanks alone."""
    lines = [table.columns, *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.columns))]
    right = [_is_numeric(table, i) for i in range(len(table.columns))]
    body = [
        "  ".join(cell.rjust(width) if to_right else cell.ljust(width) for cell, width, to_right in cells)
        for cells in (zip(line, widths, right, strict=True) for line in lines)
    ]
    return "\n".join(line.rstrip() for line in (table.title, *body))


@contextmanager
def stdout_to_stderr(active: bool) -> Iterator[None]:
    """Send what this process and its children write to standard output to standard error meanwhile."""
    if not active:
        yield
        return
    sys.stdout.flush()
    before, kept = sys.stdout, os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stderr.flush()
        sys.stdout = before
        os.dup2(kept, 1)
        os.close(kept)


def _print_rich(table: Table) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    shown = RichTable(title=table.title, title_justify="left", box=box.ROUNDED)
    for i, column in enumerate(table.columns):
        numeric = _is_numeric(table, i)
        words = [word for cell in [row[i] for row in table.rows] for word in ([cell] if numeric else cell.split())]
        widest = max(map(len, [*words, *column.split()]), default=0)  # no number and no word is cut
        shown.add_column(column, justify="right" if numeric else "left", min_width=widest)
    for row in table.rows:
        shown.add_row(*row)
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    console.print(shown, crop=False)


def _is_numeric(table: Table, column: int) -> bool:
    """Whether every cell of a column begins with a digit, or is a dash."""
    cells = [row[column].lstrip("+-~<>") for row in table.rows]
    return bool(cells) and all(not cell or cell[0].isdigit() for cell in cells)


def _plain(value: object) -> Any:
    """Return what JSON can hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence):
        return [_plain(inner) for inner in value]
    raise TypeError(f"`{type(value).__name__}` cannot be printed as JSON.")
