"""Law 5 on the gradient path: a gradient that is not finite stays where it is, and leaves no trace in what is kept."""

import pytest
import torch

from lightning_commopt.selftest.engine import SHAPES, Engine, engine, gradients_of
from lightning_commopt.selftest.nonfinite import after_skipped_steps, digest_of_state, finite, spoiled
from tests.laws import faults
from tests.laws.faults import planted
from tests.methods import Case, each_case_and_world, named_case
from tests.pool import WorkerPool

pytestmark = pytest.mark.runs("commopt", "method {method}, laws")


@each_case_and_world()
def test_a_bad_gradient_leaves_no_trace_in_a_skipped_step(
    pool: WorkerPool, case: Case, world: int, device: str
) -> None:
    assert pool.run(after_skipped_steps, world, case, device) == [[]] * world


def test_a_state_that_does_not_wait_is_seen(pool: WorkerPool, device: str) -> None:
    assert all(pool.run(planted, 3, faults.early_commit, after_skipped_steps, named_case("int8"), device))


def applied(made: Engine) -> list[str]:
    """What is wrong when the step with the bad gradient is applied: the others go on, the bad one keeps its state."""
    before = made.residuals()
    made.round(spoiled(made, 1, "body", torch.inf))
    made.path.step_done(True)
    after = made.residuals()
    wrong = [name for name in SHAPES if not after[name].isfinite().all()]
    return wrong if torch.equal(after["body"], before["body"]) else [*wrong, "body has changed"]


def thrown_away(made: Engine) -> list[str]:
    """What is wrong after the user's own code saw a bad gradient and dropped it without a step."""
    made.round(spoiled(made, 1, "body", torch.nan))
    made.zero_grad()
    return []


def zeroed(made: Engine) -> list[str]:
    """The same, with gradients that are zeros instead of None."""
    made.round(spoiled(made, 1, "body", torch.nan))
    for p in made.parameters.values():
        p.grad = torch.zeros_like(p)
    return []


def overflow(made: Engine) -> list[str]:
    """What is wrong after a loss scale that is too large for one parameter on one rank."""
    before, gradients = digest_of_state(made), gradients_of(made.rank, 1)
    if made.rank == 0:
        gradients["wide"] *= 2.0**110
    results = made.round(gradients, scale=2.0**30)
    made.path.step_done(False)
    good = finite(results) == {name: name != "wide" for name in SHAPES}
    return ["the result", "the state"][good : 1 + (digest_of_state(made) != before)]


def cleared(made: Engine) -> list[str]:
    """What is wrong where nothing protects residuals but `clear_nonfinite`."""
    made.round(spoiled(made, 1, "body", torch.nan))
    made.path.clear_nonfinite()
    made.path.step_done(True)
    return [name for name, owed in made.residuals().items() if not owed.isfinite().all()]


def recovery(case: Case, device: str) -> dict[str, list[str]]:
    """What is wrong after a bad gradient met in several ways, and in the round after it."""
    found = {}
    for meet in (applied, thrown_away, zeroed, overflow, cleared):
        with engine(case, shadow=meet is not cleared, device=device) as made:
            made.step(gradients_of(made.rank, 0))
            wrong = meet(made)
            results = finite(made.round(gradients_of(made.rank, 2), keep=meet is zeroed))
            found[meet.__name__] = wrong + [f"then {name}" for name, good in results.items() if not good]
            made.path.step_done(True)
    return {name: wrong for name, wrong in found.items() if wrong}


@each_case_and_world(worlds=(3,))
def test_a_bad_gradient_can_be_met_in_every_way(pool: WorkerPool, case: Case, world: int, device: str) -> None:
    assert pool.run(recovery, world, case, device) == [{}] * world
