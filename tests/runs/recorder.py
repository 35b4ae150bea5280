"""What pytest tells of a run, by row."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.runs.declared import Declared, Row, declared, rows
from tests.runs.table import PLACES, Cell, versions, written


class Recorder:
    """Counts the tests of each row, and writes the table when they have ended.

    Args:
        config: Of pytest.
        path: Of the table.
    """

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config = config
        self._path = path
        self._root = config.rootpath
        self._cells: dict[tuple[Row, str], Cell] = {}
        self._pending: dict[str, list[Cell]] = {}
        self._whole_files: set[str] = set()

    # ---- what is to run ---------------------------------------------------------------------------------------------

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Take note of the tests that will run."""
        parts = {Path(word.split("::")[0]).resolve() for word in self._config.args if "::" in word}
        for item in session.items:
            cells = [
                self._cell(row, self._place(item, mark)) for mark in item.iter_markers("runs") for row in of(item, mark)
            ]
            if cells:
                self._pending[item.nodeid] = cells
            if item.path not in parts:
                self._whole_files.add(str(item.path.relative_to(self._root)))

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Take note of those that will not."""
        for item in items:
            for mark in item.iter_markers("runs"):
                for row in of(item, mark):
                    self._cell(row, self._place(item, mark)).left_out.append("deselected")

    def _cell(self, row: Row, place: str) -> Cell:
        return self._cells.setdefault((row, place), Cell())

    def _place(self, item: pytest.Item, mark: pytest.Mark) -> str:
        moves = "device" in getattr(item, "fixturenames", ()) and "device" not in _parameters(item)
        return str(mark.kwargs.get("on", self._config.getoption("device") if moves else "cpu"))

    # ---- what ran ---------------------------------------------------------------------------------------------------

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once: when it failed in any phase, was skipped, or passed to its end."""
        cells = self._pending.get(report.nodeid, ())
        if report.failed:
            for cell in self._pending.pop(report.nodeid, ()):
                cell.failed += 1
        elif report.skipped:
            reason = (
                report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "skipped")
            )
            for cell in self._pending.pop(report.nodeid, ()):
                cell.left_out.append(reason.removeprefix("Skipped: "))
        elif report.when == "teardown":
            for cell in cells:
                cell.passed += 1
            self._pending.pop(report.nodeid, None)

    def pytest_sessionfinish(self) -> None:
        """Write the table."""
        for cells in self._pending.values():
            for cell in cells:
                cell.left_out.append("the run was ended")
        table = {row: self._of_row(row, entry) for row, entry in declared(self._root).items()}
        self._path.write_text(written(table, versions()))

    def _of_row(self, row: Row, entry: Declared) -> dict[str, Cell]:
        cells = {place: self._cells.get((row, place), Cell()) for place in PLACES}
        device = self._config.getoption("device")
        for place, cell in cells.items():
            empty = not (cell.passed or cell.failed or cell.left_out)
            if place == "cuda" and empty:
                cell.left_out.append("needs a GPU" if entry.takes_device else "there is no test for it")
            elif place == "cpu" and empty and device == "cuda":
                cell.left_out.append("this run was on CUDA")
            elif not entry.files <= self._whole_files:
                cell.left_out.append("not in this run" if empty else "not all of its files were in this run")
        return cells


def of(item: pytest.Item, mark: pytest.Mark) -> list[Row]:
    """The rows for which a test counts: all of a marker that its parameters do not tell apart."""
    parameters = _parameters(item)
    if "case" in parameters:
        parameters.setdefault("method", parameters["case"])
    strategy, feature = mark.args
    known = rows(strategy, feature, mark.kwargs)
    chosen = {name: (_word(value),) for name, value in parameters.items() if "{" + name + "}" in feature}
    own = rows(strategy, feature, {**mark.kwargs, **chosen})
    return own if set(own) <= set(known) else known


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return dict(item.callspec.params) if hasattr(item, "callspec") else {}


def _word(value: Any) -> str:
    """How a value of a parameter is written in a row."""
    method = getattr(value, "method", value)
    return str(getattr(method, "name", method))
