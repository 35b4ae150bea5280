"""Law 13: every rank issues the same operations in the same order, whatever its timing."""

import time

import pytest
import torch.distributed as dist

from lightning_commopt.selftest.engine import engine, gradients_of
from tests.methods import Case, each_case_and_world, named_case
from tests.pool import WorkerPool

pytestmark = pytest.mark.runs("commopt", "method {method}, laws")

ROUNDS = 30
SHAPES = {f"p{i}": (7 + i, 13) for i in range(24)} | {f"bias{i}": (5,) for i in range(8)}


def issued(case: Case, device: str) -> list[list[tuple[str, int]]]:
    """The operations of 30 rounds over many small buckets, by group; ranks are late by turns."""
    with engine(case, SHAPES, cap=0.001, device=device) as made:
        for round in range(ROUNDS):
            if round % dist.get_world_size() == dist.get_rank():
                time.sleep(0.002)
            made.step(gradients_of(made.rank, round, SHAPES))
        assert made.path.hook_calls == ROUNDS * len(made.buckets)
        assert len(made.buckets) >= 10
        return made.issued


@each_case_and_world(worlds=(4,), which=lambda case: case.method.name in ("none", "bf16"))  # every route
def test_order_is_the_same_on_all_ranks(pool: WorkerPool, case: Case, world: int, device: str) -> None:
    by_rank = pool.run(issued, world, case, device)
    assert all(len(operations) >= 10 * ROUNDS for operations in by_rank[0])
    assert all(operations == by_rank[0] for operations in by_rank)


def test_the_next_bucket_sets_out_before_the_second_hop(pool: WorkerPool, device: str) -> None:
    if device != "cpu":
        pytest.skip("A CUDA stream carries one bucket after another.")
    for (operations,) in pool.run(issued, 3, named_case("int8"), device):
        names = [name for name, _ in operations[: len(operations) // ROUNDS]]
        buckets = len(names) // 2
        assert names == ["all_to_all", *["all_to_all", "all_gather"] * (buckets - 1), "all_gather"]
