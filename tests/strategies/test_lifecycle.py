"""What surrounds training: validation in between, validation, test and prediction without a fit, and after one."""

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from typing_extensions import override

from lightning_commopt import CommOptStrategy, CommStats
from tests.methods import Case
from tests.pool import WorkerPool, trainer
from tests.strategies.toy import (
    Batch,
    Regression,
    batches,
    compresses,
    each_method,
    fit,
    flat,
    loader,
    state_of,
    strategy_of,
)

pytestmark = pytest.mark.runs("commopt", "fit, validate, test, second fit")


class Measured(Regression):
    """Logs what it sees."""

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("val", loss, sync_dist=True)
        return loss

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("test", loss, sync_dist=True)
        return loss


class Replicas(pl.Callback):
    """Whether replicas are equal when validation starts."""

    def __init__(self) -> None:
        self.equal: list[bool] = []

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        here = flat(pl_module)
        first = here.clone()
        dist.broadcast(first, 0)
        self.equal.append(torch.equal(here, first))


def fit_with_validation(case: Case) -> tuple[Tensor, Tensor, list[bool], Any, Any]:
    """Eight steps with a validation after every second, and without any."""
    replicas = Replicas()
    strategies = [strategy_of(case) for _ in range(2)]
    fitter = trainer(
        dist.get_world_size(),
        strategies[0],
        max_epochs=1,
        use_distributed_sampler=False,
        val_check_interval=2,
        callbacks=[replicas],
    )
    model = Measured()
    fitter.fit(model, loader(batches(8)), loader(batches(3, seed=1)))
    plain = fit(strategies[1], Regression(), batches(8)).parameters
    with_validation, without = (state_of(strategy) for strategy in strategies)
    return flat(model), plain, replicas.equal, with_validation, without


@each_method()
def test_validation_in_between_changes_nothing(pool: WorkerPool, case: Case, world: int) -> None:
    for validated, plain, equal, state, plain_state in pool.run(fit_with_validation, world, case):
        assert equal == [True] * 4
        assert torch.equal(validated, plain)
        torch.testing.assert_close(state, plain_state, rtol=0, atol=0)


@dataclass
class Looked:
    """What validation, test and prediction gave."""

    metrics: list[float]
    predictions: list[Tensor]
    stats: CommStats | None
    explain: str


def look(strategy: DDPStrategy, after_fit: bool) -> Looked:
    """Validate, test and predict."""
    fitter = trainer(dist.get_world_size(), strategy, max_epochs=1, use_distributed_sampler=False)
    model = Measured()
    if after_fit:
        fitter.fit(model, loader(batches(4)))
    data = loader(batches(3, seed=1))
    metrics = [
        fitter.validate(model, data, verbose=False)[0]["val"],
        fitter.test(model, data, verbose=False)[0]["test"],
    ]
    predictions = fitter.predict(model, data)
    ours = isinstance(strategy, CommOptStrategy)
    stats, line = (strategy.comm_stats(), strategy.explain()) if ours else (None, "")
    return Looked(metrics, predictions or [], stats, line)  # type: ignore[arg-type]


def look_both(case: Case) -> tuple[Looked, Looked, Looked]:
    """Ours and stock's without a fit, ours after one."""
    return look(strategy_of(case), False), look(DDPStrategy(), False), look(strategy_of(case), True)


@each_method()
def test_without_and_after_a_fit(pool: WorkerPool, case: Case, world: int) -> None:
    for ours, stock, after in pool.run(look_both, world, case):
        assert ours.metrics == stock.metrics
        assert all(torch.equal(*pair) for pair in zip(ours.predictions, stock.predictions, strict=True))
        assert ours.stats is not None
        assert ours.stats.rounds == ours.stats.hook_calls == ours.stats.sent_bytes == 0
        assert after.metrics != ours.metrics
        assert after.stats is not None
        assert (after.stats.method, after.stats.rounds) == (case.method.name, 4)
        assert after.stats.sent_bytes > 0
        if compresses(case):
            assert "will be in force during fit" in ours.explain
            assert "is in force on" in after.explain


def fit_and_fail(case: Case) -> tuple[bool, Tensor, Tensor]:
    """An error of the user in the middle, then a fit in the same process."""
    with pytest.raises(ZeroDivisionError):
        fit(strategy_of(case), Failing(), batches(4))
    again = fit(strategy_of(case), Regression(), batches(4)).parameters
    return True, again, fit(strategy_of(case), Regression(), batches(4)).parameters


class Failing(Regression):
    """Raises on every rank."""

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            raise ZeroDivisionError


@each_method(compresses)
def test_a_failed_fit_leaves_nothing_behind(pool: WorkerPool, case: Case, world: int) -> None:
    for _, again, fresh in pool.run(fit_and_fail, world, case):
        assert torch.equal(again, fresh)
