"""Buckets that travel densely beside compressed ones: laws 1, 2, 7 and 13 hold, and what they owed is sent."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_commopt.compression import Int8
from lightning_commopt.selftest.engine import Engine, engine, gradients_of
from lightning_commopt.selftest.ledger import Ledger
from lightning_commopt.selftest.wire import counted_bytes
from tests.methods import Case
from tests.pool import WorkerPool

pytestmark = pytest.mark.runs("commopt", "method {method}, laws")

DENSE = 2


class Seen(NamedTuple):
    """What a rank saw of some rounds."""

    imbalance: float
    on_the_wire: int
    promised: int
    issued: list[list[tuple[str, int]]]
    results: dict[str, Tensor]
    dense: list[str]
    owed: list[str]


def some_rounds(case: Case, device: str, **options: Any) -> Seen:
    """Rounds with all buckets compressed, with the first ones dense, with all compressed, and with the first dense."""
    with engine(case, device=device, **options) as made, counted_bytes() as total:
        before = made.path.stats()
        ledger = Ledger(made)
        for round, dense in enumerate((0, 0, DENSE, DENSE, 0, DENSE)):
            made.path.dense_buckets = dense
            ledger.step(round)
        results = made.step(gradients_of(made.rank, 6))
        sent = (made.path.stats() - before).promised.total
        counted = total[0]
        names = [name for bucket in made.buckets[:DENSE] for name in bucket]
        ledger.expect(6)
        ledger.deliver(results)
        return Seen(ledger.imbalance(), counted, sent, made.issued, results, names, owed_of(made))


def owed_of(made: Engine) -> list[str]:
    """Names of the parameters of which this rank owes something."""
    return [name for name, owed in made.residuals().items() if owed.any()]


@pytest.mark.parametrize("shadow", [True, False])
@pytest.mark.parametrize(
    ("case", "world"),
    [(Case(Int8()), 2), (Case(Int8()), 3), (Case(Int8(), hierarchy=2), 4)],
    ids=["one-phase", "two-hop", "nodes"],
)
def test_some_buckets_travel_densely(pool: WorkerPool, case: Case, world: int, shadow: bool, device: str) -> None:
    ranks = pool.run(some_rounds, world, case, device, shadow=shadow)
    for seen in ranks:
        assert seen.imbalance <= 1
        assert seen.on_the_wire == seen.promised > 0
        assert seen.issued == ranks[0].issued
        assert seen.owed
        assert not set(seen.owed) & set(seen.dense)
        for name, result in seen.results.items():
            assert torch.equal(result, ranks[0].results[name])
    exact = {name: sum(gradients_of(rank, 6)[name].double() for rank in range(world)) / world for name in seen.dense}
    for name, mean in exact.items():
        torch.testing.assert_close(ranks[0].results[name].double().cpu(), mean, rtol=1e-5, atol=1e-3)


def compared(device: str) -> list[bool]:
    """Whether each round compared a mean, with the first two buckets dense."""
    with engine(Case(Int8()), device=device, dense_buckets=DENSE) as made:
        made.path.mean_check.every = 1
        found = []
        for round in range(8):
            made.path.mean_check.cosine = None
            made.step(gradients_of(made.rank, round))
            found.append(made.path.mean_check.cosine is not None)
        return found


def test_only_compressed_means_are_compared(pool: WorkerPool, device: str) -> None:
    for found in pool.run(compared, 2, device):
        assert found == [False] + [True] * 7
