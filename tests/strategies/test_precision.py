"""Every method under every precision of Lightning: replicas bit-equal, losses as under stock DDP."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy

from tests.methods import Case
from tests.pool import WorkerPool
from tests.strategies.toy import SMALL_BUCKETS, Fit, Regression, batches, compresses, each_method, fit, strategy_of

pytestmark = pytest.mark.runs("commopt", "precision")

PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed", "16-mixed")
STEPS = 10


def fit_precisions(case: Case | None) -> dict[str, Fit]:
    """Ten steps in each precision; a case of None is stock DDP."""
    results = {}
    for precision in PRECISIONS:
        strategy = DDPStrategy(**SMALL_BUCKETS) if case is None else strategy_of(case)  # type: ignore[arg-type]
        options: dict[str, Any] = {"precision": precision}
        if precision == "16-mixed":  # Lightning itself turns it into bf16 without a scaler on the CPU
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            options = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
        # Adam hides a factor, SGD shows it
        results[precision] = fit(strategy, Regression("sgd"), batches(STEPS), **options)
    return results


@pytest.fixture(scope="module")
def stock(pool: WorkerPool) -> Callable[[int], list[dict[str, Fit]]]:
    """The fits under stock DDP, of a world size."""
    return cache(lambda world: pool.run(fit_precisions, world, None))


@each_method()
def test_precisions(pool: WorkerPool, case: Case, world: int, stock: Any) -> None:
    ranks = pool.run(fit_precisions, world, case)
    for rank, by_precision in enumerate(ranks):
        reference = stock(world)[rank]
        for precision, ran in by_precision.items():
            assert ran.steps == STEPS
            assert not ran.warnings, precision
            assert torch.equal(ran.parameters, ranks[0][precision].parameters), precision
            assert_near(case, ran, reference[precision], reference["32-true"])
        assert by_precision["64-true"].losses != by_precision["32-true"].losses
    if world == 2:  # fp64 travels as it is, and two numbers have one sum
        assert torch.equal(ranks[0]["64-true"].parameters, stock(2)[0]["64-true"].parameters)


def assert_near(case: Case, ran: Fit, stock: Fit, stock_fp32: Fit) -> None:
    """`none` is stock DDP.

    Methods of 4 bit or more end within a tenth of what stock DDP gained, plus what the precision itself changes under
    stock DDP; ten steps are too few for coarser ones: there the loss must fall.
    """
    if not compresses(case):
        assert torch.equal(ran.parameters, stock.parameters)
        return
    last, reference, exact = (torch.tensor(f.losses[-3:]).mean() for f in (ran, stock, stock_fp32))
    gained = stock.losses[0] - reference
    assert gained > 0
    if case.method.loss_safety == "C":
        assert last < ran.losses[0]
    else:
        assert (last - reference).abs() < 0.1 * gained + (reference - exact).abs()
