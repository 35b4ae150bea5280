"""Against the saved results of ``benchmarks.links``, with nothing of a synchronising step put in."""

import pytest

from benchmarks.planner import RESULTS, Row, rows, saved_runs

ROWS = [row for run in saved_runs(RESULTS) for row in rows(run)]


def named(row: Row) -> str:
    return f"{row.run}, {row.method}"


def test_there_is_something_to_compare_with() -> None:
    assert len({row.run for row in ROWS}) >= 4


@pytest.mark.parametrize("row", [row for row in ROWS if row.run.endswith(", 100mbit")], ids=named)
def test_times_are_right_where_the_link_is_the_limit(row: Row) -> None:
    assert abs(row.error) < 0.2


@pytest.mark.parametrize("row", [row for row in ROWS if not row.run.endswith(", 10gbit")], ids=named)
def test_gains_are_right(row: Row) -> None:
    assert row.planned_gain == pytest.approx(row.measured_gain, rel=0.25)


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_where_processors_are_the_limit_times_are_too_short_by_half_at_most(row: Row) -> None:
    assert -0.55 < row.error < 0.2
