"""Law 8 on the gradient path: a restarted path goes on with the same bits."""

import pickle

import pytest

from lightning_commopt.selftest.digest import digest
from lightning_commopt.selftest.engine import engine, gradients_of
from tests.methods import Case, each_case_and_world
from tests.pool import WorkerPool

pytestmark = pytest.mark.runs("commopt", "method {method}, laws")


def restarted(case: Case, start_step: int, device: str) -> tuple[list[str], list[str]]:
    """Digests of rounds 3 to 6 without and with a new path that takes over after round 3."""
    with engine(case, device=device, start_step=start_step) as made:
        for round in range(3):
            made.step(gradients_of(made.rank, round))
        saved = pickle.dumps(made.save())
        straight = [digest(made.step(gradients_of(made.rank, round))) for round in range(3, 7)]
        straight.append(digest(made.residuals()))
    with engine(case, device=device, start_step=start_step) as made:
        made.restore(pickle.loads(saved))
        untouched = pickle.loads(pickle.dumps(made.save()))
        again = [digest(made.step(gradients_of(made.rank, round))) for round in range(3, 7)]
        again.append(digest(made.residuals()))
        assert untouched["rounds"] == 3
        made.restore(untouched)  # saved before any round: what was loaded is still all there
        assert digest(made.step(gradients_of(made.rank, 3))) == straight[0]
    return straight, again


@each_case_and_world()
def test_restart_goes_on_with_the_same_bits(pool: WorkerPool, case: Case, world: int, device: str) -> None:
    by_rank = pool.run(restarted, world, case, 0, device)
    for straight, again in by_rank:
        assert len(set(straight)) == 5
        assert straight[:4] == by_rank[0][0][:4]
        assert again == straight


@each_case_and_world(worlds=(3,), which=lambda case: case.lossy and not case.hierarchy)
def test_restart_in_the_dense_beginning(pool: WorkerPool, case: Case, world: int, device: str) -> None:
    for straight, again in pool.run(restarted, world, case, 5, device):
        assert again == straight
