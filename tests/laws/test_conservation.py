"""Law 1: what goes into the exchange comes out of it, now or in a later round."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_commopt.selftest.engine import MANY_BUCKETS, ONE_BUCKET, SHAPES, Engine, engine, gradients_of
from lightning_commopt.selftest.ledger import Ledger
from lightning_commopt.strategies.regroup import regrouped
from tests.laws import faults
from tests.laws.faults import planted
from tests.methods import Case, each_case_and_world, named_case
from tests.pool import WorkerPool

pytestmark = pytest.mark.runs("commopt", "method {method}, laws")

FIRST = frozenset({"body", "wide", "norm", "scalar", "conv"})
"""The parameters of a first optimizer, or a first branch; spread over the buckets."""
SECOND = frozenset(SHAPES) - FIRST


def many_buckets(case: Case, device: str) -> float:
    """Rounds that are all applied, with no shadow."""
    with engine(case, shadow=False, device=device) as made:
        ledger = Ledger(made)
        for round in range(4):
            ledger.step(round)
        assert len(made.buckets) >= 3
        return ledger.imbalance()


def one_bucket(case: Case, device: str) -> float:
    """The same in another layout, with a shadow."""
    with engine(case, cap=ONE_BUCKET, device=device) as made:
        ledger = Ledger(made)
        for round in range(4):
            ledger.step(round)
        assert len(made.buckets) == 1
        return ledger.imbalance()


def dense_between(case: Case, device: str) -> float:
    """A dense beginning, then the method, then dense rounds that clear what it owes, then the method again."""
    with engine(case, device=device, start_step=2) as made:
        ledger = Ledger(made)
        for round in range(8):
            if round == 5:
                made.path.start_step = 6
            ledger.step(round)
            if made.path.applied_steps in (1, 2, 6):
                assert not any(owed.any() for owed in made.residuals().values()), "a dense round left something"
        return ledger.imbalance()


def changing_scale(case: Case, device: str) -> float:
    """Loss scales that are no powers of two."""
    with engine(case, device=device) as made:
        ledger = Ledger(made)
        for round, scale in enumerate((1000.0, 500.0, 1.0, 3e-3, 70000.0)):
            ledger.step(round, scale)
        return ledger.imbalance()


def skipped_and_chained(case: Case, device: str) -> float:
    """Skipped steps, two rounds before a step, a result that is thrown away, two optimizers."""
    with engine(case, device=device) as made:
        ledger, path, rank = Ledger(made), made.path, made.rank
        ledger.step(0)
        made.round(gradients_of(rank, 1))
        path.step_done(False)

        made.round(gradients_of(rank, 2))
        ledger.expect(2, casts=2)
        ledger.expect(3)
        results = made.round(gradients_of(rank, 3), keep=True)
        path.step_done(True)
        ledger.deliver(results)

        made.round(gradients_of(rank, 4))  # the next round throws its result away, with no step
        results = made.round(gradients_of(rank, 5))
        path.step_done(True, FIRST)
        path.step_done(False, SECOND)
        ledger.expect(5, [FIRST] * made.world)
        ledger.deliver(results, FIRST)

        chained_for_one_optimizer(made, ledger)
        ledger.step(8)
        return ledger.imbalance()


def chained_for_one_optimizer(made: Engine, ledger: Ledger) -> None:
    """Rounds 6 and 7: the first optimizer steps after each, the second one after both."""
    results = made.round(gradients_of(made.rank, 6))
    made.path.step_done(True, FIRST)
    ledger.expect(6, [FIRST] * made.world)
    ledger.expect(6, [SECOND] * made.world, casts=2)
    ledger.deliver(results, FIRST)
    made.zero_grad(FIRST)
    results = made.round(gradients_of(made.rank, 7), keep=True)
    made.path.step_done(True, SECOND)
    made.path.step_done(True, FIRST)
    ledger.expect(7)
    ledger.deliver(results)


def unused(case: Case, device: str) -> float:
    """Parameters that no rank uses in some rounds, or only one rank does."""
    with engine(case, unused=True, device=device) as made:
        ledger, world = Ledger(made), made.world
        everything = frozenset(SHAPES)
        only_last = [FIRST] * (world - 1) + [everything]
        for round, names in enumerate(
            ([everything] * world, [FIRST] * world, only_last, [SECOND] * world, [everything] * world)
        ):
            results = made.round(gradients_of(made.rank, round, names=names[made.rank]))
            made.path.step_done(True)
            used = frozenset().union(*names)
            assert {name for name, result in results.items() if result is not None} == used
            ledger.expect(round, names)
            ledger.deliver(results)
        return ledger.imbalance()


def branches_by_turns(case: Case, device: str) -> float:
    """Two branches with a backward each, and one step for both, or one each."""
    return branches(case, False, device)


def branches_by_turns_in_views(case: Case, device: str) -> float:
    """The same where gradients are views of the buckets."""
    return branches(case, True, device)


def branches(case: Case, view: bool, device: str) -> float:
    """What these two are out of balance."""
    with engine(case, unused=True, view=view, device=device) as made:
        ledger, rank, both = Ledger(made), made.rank, [FIRST, SECOND]
        for round in (0, 1, 2):
            made.zero_grad()
            for names in both:
                results = made.round(gradients_of(rank, round, names=names), keep=True)
                ledger.expect(round, [names] * made.world, casts=2)
            made.path.step_done(True)
            ledger.deliver(results)
        for round in (3, 4):
            for names in both:
                for name in names:
                    made.parameters[name].grad = torch.zeros_like(made.parameters[name])
                results = made.round(gradients_of(rank, round, names=names), keep=True)
                made.path.step_done(True, names)
                ledger.expect(round, [names] * made.world)
                ledger.deliver(results, names)
        return ledger.imbalance()


SCENARIOS: tuple[Callable[[Case, str], float], ...] = (
    many_buckets,
    one_bucket,
    dense_between,
    changing_scale,
    skipped_and_chained,
    unused,
    branches_by_turns,
    branches_by_turns_in_views,
)


def imbalances(case: Case, device: str) -> dict[str, float]:
    """What each scenario loses or gains, as a fraction of what rounding explains."""
    return {scenario.__name__: scenario(case, device) for scenario in SCENARIOS}


def unbalanced(by_rank: list[dict[str, float]]) -> Mapping[str, float]:
    """The scenarios that rounding does not explain on some rank."""
    return {name: worst for name in by_rank[0] if not (worst := max(found[name] for found in by_rank)) <= 1}


def test_a_lost_residual_is_seen(pool: WorkerPool, device: str) -> None:
    wrong = unbalanced(pool.run(planted, 3, faults.forgotten_residual, imbalances, named_case("int8"), device))
    assert wrong.keys() == {scenario.__name__ for scenario in SCENARIOS}
    assert min(wrong.values()) > 10


def test_a_lost_element_is_seen(pool: WorkerPool, device: str) -> None:
    wrong = unbalanced(pool.run(planted, 3, faults.lost_element, imbalances, named_case("int8"), device))
    assert "one_bucket" in wrong


@each_case_and_world(worlds=(2, 3))  # four ranks follow below, and under hierarchies
def test_nothing_is_lost(pool: WorkerPool, case: Case, world: int, device: str) -> None:
    by_rank = pool.run(imbalances, world, case, device)
    assert not unbalanced(by_rank)


WORLD_CHANGES = ((2, 4), (4, 2), (3, 2), (3, 4))


def changes(case: Case, device: str) -> dict[str, float]:
    """Some rounds in one world, some in another one, or with another method, that takes over what is owed."""
    other = named_case("int4" if case.method.name == "onebit" else "onebit")
    found = {f"{old} to {new}": regroup(case, case, old, new, device) for old, new in WORLD_CHANGES}
    return found | {
        "method": regroup(case, other, 4, 4, device),
        "method and world": regroup(other, case, 3, 4, device),
    }


def regroup(case: Case, other: Case, old: int, new: int, device: str) -> float:
    """The imbalance after a change from one case and the first `old` ranks to the other and the first `new`."""
    rank = dist.get_rank()
    saved: list[Any] = [None] * dist.get_world_size()
    with engine(case, members=range(old), device=device) as before:
        if rank < old:
            ledger = Ledger(before)
            for round in range(3):
                ledger.step(round)
        dist.all_gather_object(saved, (before.save(), ledger.sums, before.path.shards) if rank < old else None)
    with engine(other, cap=2 * MANY_BUCKETS, members=range(new), device=device) as after:
        if rank >= new:
            return 0.0
        states, shards = [engine_state["state"] for engine_state, *_ in saved[:old]], saved[0][2]
        state = regrouped(states, new, rank, old_shards=shards, new_shards=after.path.shards)
        after.restore({**saved[0][0], "state": state})
        continued = Ledger(after, saved[0][1])
        for round in range(3, 6):
            continued.step(round)
        return continued.imbalance()


@each_case_and_world(worlds=(4,), which=lambda case: case.lossy)
def test_nothing_is_lost_when_world_or_method_change(pool: WorkerPool, case: Case, world: int, device: str) -> None:
    assert not unbalanced(pool.run(changes, world, case, device))
