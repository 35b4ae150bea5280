"""Two optimizers by hand, one of which meets a gradient that is not finite: it skips its step, the other does not."""

from functools import partial
from typing import Any

import pytest
from torch import Tensor
from typing_extensions import override

from tests.methods import Case
from tests.pool import WorkerPool
from tests.strategies.chosen import SHAPES, Ledger, assert_conserved, mean_gradient, total, train
from tests.strategies.test_conserved import FIRST, SECOND, Adversaries
from tests.strategies.toy import ScaledFP32, each_route

pytestmark = pytest.mark.runs("commopt", "non-finite gradients")

STEPS, BAD = 4, 2


class Spoilt(Adversaries):
    """The first loss of one step is not finite on rank 1."""

    @override
    def loss(self, number: int, names: Any = tuple(SHAPES)) -> Tensor:
        loss = super().loss(number, names)
        return loss * float("inf") if number == 2 * BAD and self.global_rank == 1 else loss


VARIANTS = {
    "in turn, toggled": (True, False),
    "in turn, shared": (False, False),
    "together, toggled": (True, True),
    "together, shared": (False, True),
}


def train_spoilt(case: Case) -> dict[str, Ledger]:
    """Skipped by us in every variant; by a scaler where each step follows its backward pass."""
    unused = {"find_unused_parameters": True}
    ledgers = {
        f"skip, {kind}": train(case, partial(Spoilt, *variant), STEPS, unused | {"nonfinite": "skip"})
        for kind, variant in VARIANTS.items()
    }
    for kind, variant in VARIANTS.items():
        if not variant[1]:  # a scaler is updated after each step: the second one's gradients must come after it
            plugins = [ScaledFP32(256.0)]
            ledgers[f"scaler, {kind}"] = train(case, partial(Spoilt, *variant), STEPS, unused, plugins=plugins)
    return ledgers


@each_route(lambda case: case.lossy)
def test_only_the_optimizer_of_a_bad_gradient_skips(pool: WorkerPool, case: Case, world: int) -> None:
    ranks = pool.run(train_spoilt, world, case)
    mean = partial(mean_gradient, world=world)
    for kind in ranks[0]:
        ledgers = [by_kind[kind] for by_kind in ranks]
        good = [step for step in range(STEPS) if step != BAD]
        truth: dict[str, Tensor] = {}
        for name in FIRST:
            truth[name] = total(mean(name, 2 * step) for step in good)
            if kind.endswith("together, shared"):
                truth[name] += total(mean(name, 2 * step + 1) for step in good)
        for name in SECOND:
            truth[name] = total(mean(name, 2 * step + 1) for step in range(STEPS))
        assert_conserved(ledgers, truth, case)
        for ledger in ledgers:
            assert (ledger.stats.applied_steps, ledger.stats.skipped_steps) == (2 * STEPS - 1, 1), kind
