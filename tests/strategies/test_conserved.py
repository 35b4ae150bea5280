"""Nothing is lost in training: applied plus waiting is the sum of true means, however the user steps.

Accumulation, several backward passes a step, two optimizers that share backward passes, parameters that some or all
ranks leave unused, and gradients that are thrown away.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_commopt import Int4, PowerSGD
from tests.methods import Case
from tests.pool import WorkerPool
from tests.strategies.chosen import SHAPES, Chosen, Ledger, assert_conserved, mean_gradient, total, train
from tests.strategies.toy import each_route

pytestmark = pytest.mark.runs("commopt", "training conserves gradients")

STEPS = 6
FIRST = [name for name in SHAPES if name.startswith("d")]
SECOND = [name for name in SHAPES if not name.startswith("d")]


# ---- one optimizer --------------------------------------------------------------------------------------------------


class TwoPasses(Chosen):
    """Two backward passes a step, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(2 * batch_idx))
        self.manual_backward(self.loss(2 * batch_idx + 1))
        optimizer.step()


def train_simply(case: Case) -> dict[str, Ledger]:
    """Automatic, accumulated, and two passes."""
    return {
        "automatic": train(case, Chosen, STEPS, {}),
        "accumulated": train(case, Chosen, STEPS, {}, accumulate_grad_batches=3),
        "short window": train(case, Chosen, STEPS - 1, {"true_mean": True}, accumulate_grad_batches=3),
        "two passes": train(case, TwoPasses, STEPS // 2, {}),
    }


@each_route()
def test_one_optimizer(pool: WorkerPool, case: Case, world: int) -> None:
    ranks = pool.run(train_simply, world, case)
    mean = partial(mean_gradient, world=world)
    truths = {
        "automatic": {n: total(mean(n, i) for i in range(STEPS)) for n in SHAPES},
        "accumulated": {n: total(mean(n, i) for i in range(STEPS)) / 3 for n in SHAPES},
        "short window": {
            n: total(mean(n, i) for i in (0, 1, 2)) / 3 + total(mean(n, i) for i in (3, 4)) / 2 for n in SHAPES
        },
        "two passes": {n: total(mean(n, i) for i in range(STEPS)) for n in SHAPES},
    }
    rounds = {"automatic": STEPS, "accumulated": STEPS // 3, "short window": 2, "two passes": STEPS}
    for kind, truth in truths.items():
        ledgers = [by_kind[kind] for by_kind in ranks]
        assert_conserved(ledgers, truth, case)
        assert ledgers[0].stats.rounds == rounds[kind]


# ---- two optimizers -------------------------------------------------------------------------------------------------


class Adversaries(Chosen):
    """Two optimizers by hand, as for a GAN.

    Args:
        toggled: Whether the second loss leaves the first optimizer's parameters alone.
        together: Whether both backward passes come before both steps.
        set_to_none: How gradients are zeroed.
    """

    def __init__(self, toggled: bool, together: bool, set_to_none: bool = True) -> None:
        super().__init__(optimizers=2)
        self.toggled = toggled
        self.together = together
        self.set_to_none = set_to_none

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        if self.together:
            first.zero_grad(self.set_to_none)
            second.zero_grad(self.set_to_none)
            self.manual_backward(self.loss(2 * batch_idx, FIRST))
            self._second_loss(2 * batch_idx + 1)
            first.step()
            second.step()
            return
        first.zero_grad(self.set_to_none)
        self.manual_backward(self.loss(2 * batch_idx, FIRST))
        first.step()
        second.zero_grad(self.set_to_none)
        self._second_loss(2 * batch_idx + 1)
        second.step()

    def _second_loss(self, number: int) -> None:
        _, second = self.optimizers()
        if self.toggled:
            self.toggle_optimizer(second)
        self.manual_backward(self.loss(number, SECOND if self.toggled else list(SHAPES)))
        if self.toggled:
            self.untoggle_optimizer(second)


VARIANTS = {
    f"{'toggled' if toggled else 'shared'}, {'together' if together else 'in turn'}, {'none' if none else 'zero'}": (
        toggled,
        together,
        none,
    )
    for toggled in (False, True)
    for together in (False, True)
    for none in (True, False)
}


PAIRS = [
    "shared, in turn, none",
    "shared, together, zero",
    "toggled, in turn, zero",
    "toggled, together, none",
]
"""Each choice with each other one."""


def train_adversaries(case: Case, views: bool, variants: Sequence[str]) -> dict[str, Ledger]:
    """Each variant."""
    strategy = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
    return {kind: train(case, partial(Adversaries, *VARIANTS[kind]), STEPS // 2, strategy) for kind in variants}


@each_route()
def test_two_optimizers(pool: WorkerPool, case: Case, world: int) -> None:
    assert_adversaries(pool.run(train_adversaries, world, case, False, PAIRS), case)


@pytest.mark.parametrize("case", [Case(Int4()), Case(PowerSGD(rank=2))], ids=lambda case: case.id)
def test_two_optimizers_with_bucket_views(pool: WorkerPool, case: Case) -> None:
    assert_adversaries(pool.run(train_adversaries, 3, case, True, list(VARIANTS)), case)


def assert_adversaries(ranks: list[dict[str, Ledger]], case: Case) -> None:
    """Each variant applied what it should have."""
    mean = partial(mean_gradient, world=len(ranks))
    for kind in ranks[0]:
        toggled, together, _ = VARIANTS[kind]
        of_first = range(STEPS) if together and not toggled else range(0, STEPS, 2)
        truth = {n: total(mean(n, i) for i in of_first) for n in FIRST}
        truth |= {n: total(mean(n, i) for i in range(1, STEPS, 2)) for n in SECOND}
        assert_conserved([by_kind[kind] for by_kind in ranks], truth, case)


# ---- unused parameters ----------------------------------------------------------------------------------------------


class Unused(Chosen):
    """`g` is used by rank 1 alone, `head` by nobody in odd steps."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        names = ["d", "d_bias", "g_bias"]
        if self.global_rank == 1:
            names.append("g")
        if batch_idx % 2 == 0:
            names.append("head")
        return self.loss(batch_idx, names)


class NeverUsed(Chosen):
    """`head` is used by nobody, `g` by rank 1 alone, over accumulation windows of two."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        names = ["d", "d_bias", "g_bias"]
        if self.global_rank == 1 and batch_idx % 2 == 0:  # in the pass that does not synchronise
            names.append("g")
        return self.loss(batch_idx, names)


def train_unused(case: Case) -> list[Ledger]:
    """Both kinds, gradients as copies and as views."""
    results = []
    for views in (False, True):
        strategy = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
        results.append(train(case, Unused, STEPS, strategy))
        results.append(train(case, NeverUsed, STEPS, strategy, accumulate_grad_batches=2))
    return results


@each_route()
def test_unused_parameters(pool: WorkerPool, case: Case, world: int) -> None:
    ranks = pool.run(train_unused, world, case)
    mean = partial(mean_gradient, world=world)
    truth = {n: total(mean(n, i) for i in range(STEPS)) for n in ("d", "d_bias", "g_bias")}
    sometimes = truth | {
        "g": total(mean("g", i, users=[1]) for i in range(STEPS)),
        "head": total(mean("head", i) for i in range(0, STEPS, 2)),
    }
    never = {n: t / 2 for n, t in truth.items()} | {
        "g": total(mean("g", i, users=[1]) for i in range(0, STEPS, 2)) / 2,
        "head": torch.zeros(SHAPES["head"], dtype=torch.float64),
    }
    for index, expected in enumerate((sometimes, never, sometimes, never)):
        assert_conserved([ledgers[index] for ledgers in ranks], expected, case)


# ---- thrown away ----------------------------------------------------------------------------------------------------


class ThrownAway(Chosen):
    """The user zeroes the gradients of every other backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch_idx))
        if batch_idx % 2 == 0:
            optimizer.step()
        optimizer.zero_grad()


def train_thrown_away(case: Case) -> Ledger:
    """Half of the gradients are never applied."""
    return train(case, ThrownAway, STEPS, {})


@each_route()
def test_gradients_that_are_thrown_away_leave_no_residual(pool: WorkerPool, case: Case, world: int) -> None:
    truth = {n: total(mean_gradient(n, i, world) for i in range(0, STEPS, 2)) for n in SHAPES}
    assert_conserved(pool.run(train_thrown_away, world, case), truth, case)
