"""The laws as `commopt doctor --selftest` tests them: they hold, and whoever breaks one is named."""

import re
from collections.abc import Callable
from datetime import timedelta

import pytest

from lightning_commopt.selftest.run import Report, run_laws
from tests.laws import faults
from tests.laws.faults import planted
from tests.pool import WorkerFailure, WorkerPool


def laws_of(device: str, method: str, ranks_per_node: int | None, timeout_s: float) -> Report:
    """All laws, over a method."""
    return run_laws(device, methods=[method], ranks_per_node=ranks_per_node, timeout=timedelta(seconds=timeout_s))


def test_laws_hold_inside_and_between_nodes(pool: WorkerPool, device: str) -> None:
    for report in pool.run(laws_of, 4, device, "int4", 2, 60):
        assert not report.failed
        assert {outcome.status for outcome in report.outcomes} == {"passed"}
        assert {outcome.method for outcome in report.outcomes} == {"int4", "int4-nodes_of_2"}
        assert report.routes["int4-nodes_of_2"] == "reduced inside nodes of 2, encoded between 2"
        assert report.hierarchy == ""


FAULTS: tuple[tuple[Callable[[], None], str, str], ...] = (
    (faults.dropped_chunk, "conservation", r"`\w+` differ from the true means of 4 rounds by \S+ times what rounding"),
    (faults.dropped_chunk, "once", "elements of `body` were lost"),
    (faults.forgotten_residual, "conservation", "times what rounding explains"),
    (faults.short_message, "bytes", r"(\d+) bytes were promised for 3 rounds, \1 counted, (?!\1)\d+ handed"),
    (faults.uncounted_message, "bytes", "handed to the collectives"),
    (faults.own_value, "replicas", r"rank 1: its parameters have other bits than those of rank 0 from step 1 on"),
    (faults.other_order, "order", r"rank 1: operation \d+ is (\w+)_coalesced of (\d+) bytes, on rank 0 \1 of \2 b"),
    (faults.early_commit, "nonfinite", "nan in `body`: residuals changed in a step that was skipped"),
    (faults.forgotten_state, "restart", "round 1 has other bits after a restart"),
)


@pytest.mark.parametrize("fault", dict.fromkeys(fault for fault, _, _ in FAULTS))
def test_a_broken_law_is_found(pool: WorkerPool, device: str, fault: Callable[[], None]) -> None:
    reports = pool.run(planted, 2, fault, laws_of, device, "int8", None, 60)
    assert reports[0] == reports[1]
    said = {outcome.law: "\n".join(map(str, outcome.faults)) for outcome in reports[0].failed}
    for planted_fault, law, words in FAULTS:
        if planted_fault is fault:
            assert law in said
            assert re.search(words, said[law]), said[law]
    assert len(said) < len({outcome.law for outcome in reports[0].outcomes}), "every law fails: none tells anything"


def test_a_rank_that_raises_is_named(pool: WorkerPool, device: str) -> None:
    report = pool.run(planted, 2, faults.raising_rank, laws_of, device, "int8", None, 4)[1]
    broken, *rest = report.outcomes
    assert str(broken.faults[0]) == "rank 1: ArithmeticError: no such instruction"
    assert {outcome.status for outcome in rest} == {"not run"}


def test_one_rank_has_nobody_to_differ_from(pool: WorkerPool, device: str) -> None:
    with pytest.raises(WorkerFailure, match="at least 2 processes"):
        pool.run(laws_of, 1, device, "int8", None, 60)
