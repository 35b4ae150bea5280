"""Law 4: one round for each synchronising backward, however many came before it."""

import pytest

from lightning_commopt.selftest.engine import engine, gradients_of
from lightning_commopt.selftest.ledger import Ledger
from tests.methods import Case, each_case_and_world
from tests.pool import WorkerPool

pytestmark = pytest.mark.runs("commopt", "method {method}, laws")


def accumulate(case: Case, device: str) -> tuple[list[int], list[int], int, float]:
    """Rounds and hook calls after each of three steps of 1, 3 and 2 backward passes; and what is out of balance."""
    rounds, calls = [], []
    with engine(case, device=device) as made:
        ledger, micro = Ledger(made), 0
        for passes in (1, 3, 2):
            made.zero_grad()
            for _ in range(passes - 1):
                made.accumulate(gradients_of(made.rank, micro))
                ledger.expect(micro)
                micro += 1
            results = made.round(gradients_of(made.rank, micro), keep=True)
            ledger.expect(micro)
            micro += 1
            made.path.step_done(True)
            ledger.deliver(results)
            rounds.append(made.path.rounds)
            calls.append(made.path.hook_calls)
        stats = made.path.stats()
        assert (stats.rounds, stats.hook_calls, stats.applied_steps) == (3, calls[-1], 3)
        return rounds, calls, len(made.buckets), ledger.imbalance()


@each_case_and_world(worlds=(3,))
def test_accumulation_is_one_round(pool: WorkerPool, case: Case, world: int, device: str) -> None:
    for rounds, calls, buckets, imbalance in pool.run(accumulate, world, case, device):
        assert buckets >= 3
        assert rounds == [1, 2, 3]
        assert calls == [buckets, 2 * buckets, 3 * buckets]
        assert imbalance <= 1


def chain(case: Case, device: str) -> tuple[int, int]:
    """Rounds and steps after two synchronising backward passes and one step."""
    with engine(case, device=device) as made:
        made.round(gradients_of(made.rank, 0))
        made.round(gradients_of(made.rank, 1), keep=True)
        made.path.step_done(True)
        return made.path.rounds, made.path.applied_steps


@each_case_and_world(worlds=(3,))
def test_every_synchronising_backward_is_a_round(pool: WorkerPool, case: Case, world: int, device: str) -> None:
    assert pool.run(chain, world, case, device) == [(2, 1)] * world
