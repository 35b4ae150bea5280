"""A result does not depend on which parameters share a bucket: DDP's layout is no part of the mathematics."""

import pytest

from lightning_commopt.selftest.digest import digest
from lightning_commopt.selftest.engine import MANY_BUCKETS, ONE_BUCKET, engine, gradients_of
from tests.methods import Case, each_case_and_world
from tests.pool import WorkerPool

pytestmark = pytest.mark.runs("commopt", "method {method}, laws")


def by_layout(case: Case, device: str) -> dict[float, list[str]]:
    """Digests of five results under three sizes of a bucket."""
    found = {}
    for cap in (MANY_BUCKETS, 2 * MANY_BUCKETS, ONE_BUCKET):
        with engine(case, cap=cap, device=device) as made:
            found[cap] = [digest(made.step(gradients_of(made.rank, round))) for round in range(5)]
            found[-cap] = [str(len(made.buckets))]
    return found


@each_case_and_world(worlds=(3,), which=lambda case: case.layout_independent)
def test_bits_do_not_depend_on_the_layout(pool: WorkerPool, case: Case, world: int, device: str) -> None:
    by_rank = pool.run(by_layout, world, case, device)
    for found in by_rank:
        assert found == by_rank[0]
        assert found[-MANY_BUCKETS] > found[-2 * MANY_BUCKETS] > found[-ONE_BUCKET] == ["1"]
        assert found[MANY_BUCKETS] == found[ONE_BUCKET]
        assert found[2 * MANY_BUCKETS] == found[ONE_BUCKET]
