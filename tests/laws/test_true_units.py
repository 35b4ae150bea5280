"""Law 6: what is carried over a step does not know the loss scale."""

from collections.abc import Sequence

import pytest

from lightning_commopt.selftest.digest import digest
from lightning_commopt.selftest.engine import engine, gradients_of
from tests.laws import faults
from tests.laws.faults import planted
from tests.methods import Case, each_case_and_world, named_case
from tests.pool import WorkerPool

pytestmark = pytest.mark.runs("commopt", "method {method}, laws")

SCALES = (2.0**10, 2.0**9, 2.0**16, 1.0, 2.0**-3)


def trajectory(case: Case, scales: Sequence[float], device: str) -> list[tuple[str, str]]:
    """Digests of results in true units and of residuals after each step."""
    with engine(case, device=device) as made:
        steps = []
        for round, scale in enumerate(scales):
            results = made.step(gradients_of(made.rank, round), scale)
            steps.append((digest(results), digest(made.residuals())))
        return steps


def both(case: Case, device: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The trajectory without and with a loss scale that changes."""
    return trajectory(case, [1.0] * len(SCALES), device), trajectory(case, SCALES, device)


@each_case_and_world(worlds=(2, 3), which=lambda case: case.scale_free)
def test_scale_leaves_no_trace(pool: WorkerPool, case: Case, world: int, device: str) -> None:
    for without, with_scale in pool.run(both, world, case, device):
        assert len(set(without)) == len(SCALES)
        assert with_scale == without


def test_scaled_residuals_are_seen(pool: WorkerPool, device: str) -> None:
    for without, with_scale in pool.run(planted, 3, faults.scaled_units, both, named_case("int8"), device):
        assert with_scale[0][0] == without[0][0], "the first round carries nothing over"
        assert with_scale[1][0] != without[1][0]
