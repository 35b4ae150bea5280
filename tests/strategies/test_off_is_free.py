"""Where nothing is to be won nothing is done: no hook, DDP's own reducer, the bits of stock DDP."""

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_commopt import CommOptStrategy
from lightning_commopt.compression import METHODS
from tests.pool import WorkerPool
from tests.strategies.toy import SMALL_BUCKETS, Fit, Regression, batches, fit

pytestmark = pytest.mark.runs("commopt", "none is plain DDP")


class Wrapper(pl.Callback):
    """Notes the class that wraps the module."""

    kind: type | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.kind = type(trainer.strategy.model)


@dataclass
class Off:
    """A fit in which nothing of ours runs.

    Args:
        fit: What it gave.
        plain: Whether stock DDP wrapped the module.
    """

    fit: Fit
    plain: bool


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "small buckets": SMALL_BUCKETS,
    "unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
}


def fit_all(options: dict[str, Any], strategies: list[str]) -> list[Off]:
    """Twenty steps under stock DDP, then under each of ours."""
    chosen: list[Any] = [DDPStrategy(**options)]
    for name in strategies:
        strategy = CommOptStrategy(name, **options)
        chosen.append(strategy)
    results = []
    for strategy in chosen:
        wrapper = Wrapper()
        ran = fit(strategy, Regression(), batches(20), callbacks=[wrapper])
        results.append(Off(ran, wrapper.kind is DistributedDataParallel))
    return results


@pytest.mark.parametrize(
    ("world", "name"),
    [*((2, name) for name in OPTIONS if name != "small buckets"), (3, "small buckets")],  # sums of three have an order
)
def test_none_and_auto_are_ddp(pool: WorkerPool, world: int, name: str) -> None:
    for stock, *ours in pool.run(fit_all, world, OPTIONS[name], ["auto", "none"]):
        for off in ours:
            assert off.plain
            assert not off.fit.hook
            assert torch.equal(off.fit.parameters, stock.fit.parameters)
            assert off.fit.losses == stock.fit.losses
            assert off.fit.buckets == stock.fit.buckets
            assert not off.fit.warnings
            assert off.fit.stats is not None
            assert off.fit.stats.hook_calls == 0
            assert off.fit.stats.rounds == 20
            assert off.fit.stats.sent_bytes == off.fit.stats.dense_bytes > 0


def test_one_process_is_ddp(pool: WorkerPool) -> None:
    stock, *ours = pool.run(fit_all, 1, {}, ["auto", *METHODS])[0]
    for off in ours:
        assert off.plain
        assert not off.fit.hook
        assert torch.equal(off.fit.parameters, stock.fit.parameters)
        assert off.fit.stats is not None
        assert off.fit.stats.sent_bytes == off.fit.stats.hook_calls == 0
