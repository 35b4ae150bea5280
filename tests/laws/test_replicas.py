"""Law 2: after every synchronous step the parameters are the same bits on all ranks."""

import pytest

from lightning_commopt.selftest.digest import digest
from lightning_commopt.selftest.engine import gradients_of
from lightning_commopt.selftest.replicas import training
from tests.laws import faults
from tests.laws.faults import planted
from tests.methods import Case, each_case_and_world, named_case
from tests.pool import WorkerPool

pytestmark = pytest.mark.runs("commopt", "method {method}, laws")


@each_case_and_world()
def test_parameters_are_bit_equal(pool: WorkerPool, case: Case, world: int, device: str) -> None:
    by_rank = pool.run(training, world, case, "adam" if world == 3 else "momentum", device)
    assert len(set(by_rank[0].parameters)) == 20, "training stands still"
    assert digest(gradients_of(0, 0)) != digest(gradients_of(1, 0)), "all ranks have the same data"
    for rank, ran in enumerate(by_rank):
        assert ran.parameters == by_rank[0].parameters
        same_group = by_rank[rank % case.hierarchy if case.hierarchy else 0]  # between nodes: those of the same place
        assert ran.issued[0] == same_group.issued[0]
        assert ran.issued[1:] == by_rank[0].issued[1:]


def test_another_result_on_one_rank_is_seen(pool: WorkerPool, device: str) -> None:
    by_rank = pool.run(planted, 3, faults.own_value, training, named_case("int8"), "momentum", device)
    first = [ran.parameters[0] for ran in by_rank]
    assert first[0] == first[2] != first[1]
