"""Accumulation exchanges once a window: one round, one residual update, the bytes of one round."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from tests.methods import Case
from tests.pool import WorkerPool
from tests.strategies.toy import (
    Batch,
    Fit,
    Regression,
    batches,
    compresses,
    each_method,
    each_route,
    fit,
    flat,
    same_bits,
    state_of,
    strategy_of,
)

pytestmark = pytest.mark.runs("commopt", "gradient accumulation")

WINDOW, WINDOWS = 4, 3


def joined(data: list[Batch], window: int) -> list[Batch]:
    """Windows of batches as one batch each; the last may be shorter."""
    parts = [data[i : i + window] for i in range(0, len(data), window)]
    return [(torch.cat([x for x, _ in part]), torch.cat([y for _, y in part])) for part in parts]


class Changes(pl.Callback):
    """In which batches the residuals changed."""

    def __init__(self) -> None:
        self.changed: list[int] = []
        self.last: Any = None

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        state = state_of(trainer.strategy)
        if state and (self.last is None or not same_bits(state, self.last)):
            self.changed.append(batch_idx)
        self.last = state or None


def fit_accumulating(case: Case) -> tuple[Fit, Fit, list[int]]:
    """Windows of four, and each window as one batch."""
    data, changes = batches(WINDOW * WINDOWS), Changes()
    options: dict[str, Any] = {"accumulate_grad_batches": WINDOW, "callbacks": [changes]}
    accumulated = fit(strategy_of(case, nonfinite="skip"), Regression("sgd"), data, **options)
    return accumulated, fit(strategy_of(case), Regression("sgd"), joined(data, WINDOW)), changes.changed


@each_route()
def test_a_window_is_one_round(pool: WorkerPool, case: Case, world: int) -> None:
    ranks = pool.run(fit_accumulating, world, case)
    for accumulated, whole, changed in ranks:
        assert accumulated.stats is not None
        assert whole.stats is not None
        assert accumulated.steps == whole.steps == accumulated.stats.rounds == WINDOWS
        assert accumulated.stats.sent_bytes == accumulated.stats.promised.total == whole.stats.sent_bytes > 0
        assert accumulated.stats.hook_calls == whole.stats.hook_calls
        assert torch.equal(accumulated.parameters, ranks[0][0].parameters)
        if case.lossy:
            assert changed == [WINDOW * i - 1 for i in range(1, WINDOWS + 1)]
        if not compresses(case):
            torch.testing.assert_close(accumulated.parameters, whole.parameters, rtol=1e-4, atol=1e-6)


def fit_short_windows(case: Case) -> tuple[Fit, Fit, Fit]:
    """Six batches in windows of four: divided by the real length, by the nominal one, and as joined batches."""
    data = batches(6)
    fits = [
        fit(strategy_of(case, true_mean=true), Regression("sgd"), data, accumulate_grad_batches=4)
        for true in (True, False)
    ]
    return fits[0], fits[1], fit(strategy_of(case), Regression("sgd"), joined(data, 4))


@each_method()
def test_true_mean_of_a_short_window(pool: WorkerPool, case: Case, world: int) -> None:
    for rank, (true, nominal, whole) in enumerate(pool.run(fit_short_windows, world, case)):
        off, far = (float((ran.parameters - whole.parameters).norm()) for ran in (true, nominal))
        assert off < 0.1 * far
        assert not true.warnings
        assert len(nominal.warnings) == (rank == 0)
        assert all("has 2 of 4 batches" in text and "`true_mean=True`" in text for text in nominal.warnings)


class HandAccumulated(Regression):
    """The user's own accumulation under manual optimisation: a step after every second batch."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.automatic_optimization = False

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.optimizers().step()  # type: ignore[union-attr]
            self.optimizers().zero_grad()  # type: ignore[union-attr]
        return loss


def fit_by_hand(case: Case) -> tuple[Fit, Fit]:
    """By hand, and each window as one batch."""
    data = batches(8)
    return fit(strategy_of(case), HandAccumulated(), data), fit(strategy_of(case), Regression("sgd"), joined(data, 2))


@each_method()
def test_accumulation_by_hand_exchanges_every_pass(pool: WorkerPool, case: Case, world: int) -> None:
    ranks = pool.run(fit_by_hand, world, case)
    for by_hand, whole in ranks:
        assert by_hand.stats is not None
        assert by_hand.stats.rounds == 8
        assert torch.equal(by_hand.parameters, ranks[0][0].parameters)
        if compresses(case):
            assert by_hand.stats.applied_steps == 4
        if case.method.loss_safety != "C":
            moved = (whole.parameters - flat(Regression())).norm()
            assert (by_hand.parameters - whole.parameters).norm() < 0.1 * moved
