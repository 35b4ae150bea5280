"""Parameters that are frozen or unfrozen during a fit: the module is wrapped again, and nothing owed is lost."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commopt import Int8, PowerSGD, Uncompressed
from lightning_commopt.callbacks import CommMonitor
from lightning_commopt.routes.control import FingerprintError
from tests.methods import Case
from tests.pool import WorkerPool
from tests.strategies.toy import (
    SMALL_BUCKETS,
    Batch,
    Fit,
    Regression,
    batches,
    compresses,
    fit,
    same_bits,
    state_of,
    strategy_of,
)

pytestmark = pytest.mark.runs("commopt", "freezing and unfreezing")

STEPS = 6
RATE = 1e-3
NONE, INT8 = Case(Uncompressed()), Case(Int8())


class Backbone(Regression):
    """The first layer and the norm are not in the optimizer at first; notes the exchange's state as epochs begin."""

    def __init__(self) -> None:
        super().__init__()
        self.wrapped: list[dict[str, Any]] = []

    def late(self) -> list[nn.Module]:
        return [self.layers[0], self.layers[1]]

    def early(self) -> nn.Module:
        return self.layers[3]

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.wrapped.append(state_of(self.trainer.strategy))
        return super().training_step(batch, batch_idx)

    @override
    def configure_optimizers(self) -> Optimizer:
        late = {p for module in self.late() for p in module.parameters()}
        return torch.optim.AdamW([p for p in self.parameters() if p not in late], RATE)


class Finetune(BaseFinetuning):
    """Trains them from the second epoch on, as Lightning's callbacks do, and freezes another layer in the third."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[dict[str, Any]] = []

    @override
    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Backbone)
        self.freeze(pl_module.late())

    @override
    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Optimizer) -> None:
        assert isinstance(pl_module, Backbone)
        self.before.append(state_of(pl_module.trainer.strategy))
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.late(), optimizer, lr=RATE)
        if epoch == 2:
            pl_module.early().requires_grad_(False)


class Reference(pl.Callback):
    """The same steps with everything trainable for DDP from the start."""

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Backbone)
        if trainer.current_epoch == 1:
            late: Iterable[nn.Parameter] = [p for module in pl_module.late() for p in module.parameters()]
            trainer.optimizers[0].add_param_group({"params": late, "lr": RATE})

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, _: Optimizer) -> None:
        assert isinstance(pl_module, Backbone)
        if trainer.current_epoch == 2:
            pl_module.early().zero_grad()


@dataclass
class Tuned:
    """A fit, and the exchange's state before and after each change."""

    fit: Fit
    before: list[dict[str, Any]]
    after: list[dict[str, Any]]


def tune(case: Case | None, options: dict[str, Any]) -> Tuned:
    """Three epochs; a case of None is stock DDP with everything trainable from the start."""
    model, callback = Backbone(), Finetune()
    callbacks = [Reference()] if case is None else [callback, CommMonitor(table=False)]
    strategy = DDPStrategy(**SMALL_BUCKETS) if case is None else strategy_of(case, **options)  # type: ignore[arg-type]
    ran = fit(strategy, model, batches(STEPS), callbacks=callbacks, max_epochs=3)
    return Tuned(ran, callback.before, model.wrapped)


CASES: dict[str, tuple[Case, int, dict[str, Any]]] = {
    "none": (NONE, 2, {}),
    "none, views": (NONE, 2, {"gradient_as_bucket_view": True}),
    "none, unused": (NONE, 2, {"find_unused_parameters": True}),
    "none, static": (NONE, 2, {"static_graph": True}),
    "int8": (INT8, 2, {}),
    "int8, views": (INT8, 3, {"gradient_as_bucket_view": True}),
    "int8, unused": (INT8, 3, {"find_unused_parameters": True}),
    "int8, skip": (INT8, 2, {"nonfinite": "skip"}),
    "powersgd": (Case(PowerSGD(rank=2)), 3, {}),
    "one process": (INT8, 1, {}),
}


@pytest.fixture(scope="module")
def stock(pool: WorkerPool) -> Callable[[int], list[Tuned]]:
    """The fits under stock DDP, of a world size."""
    return cache(lambda world: pool.run(tune, world, None, {}))


@pytest.mark.parametrize("name", CASES)
def test_wrapped_again(pool: WorkerPool, name: str, stock: Callable[[int], list[Tuned]]) -> None:
    case, world, options = CASES[name]
    ranks = pool.run(tune, world, case, options)
    changes = 1 if "find_unused_parameters" in options else 2  # there DDP bears with what is frozen
    assert pool.output[0].count("wrapped again") == changes
    for tuned, reference in zip(ranks, stock(world), strict=True):
        assert torch.equal(tuned.fit.parameters, ranks[0].fit.parameters)
        assert not tuned.fit.warnings
        assert tuned.fit.steps == 3 * STEPS
        if world == 1 or not compresses(case):
            assert torch.equal(tuned.fit.parameters, reference.fit.parameters)
        else:
            moved = (reference.fit.parameters - torch.cat([p.flatten() for p in Backbone().parameters()])).norm()
            assert (tuned.fit.parameters - reference.fit.parameters).norm() < moved / (4 if case is INT8 else 1)
        if world > 1:
            assert tuned.fit.stats is not None
            assert tuned.fit.stats.rounds == 3 * STEPS
            assert tuned.fit.stats.promised.total == tuned.fit.stats.sent_bytes
        for before, after in zip(tuned.before[1:], tuned.after[1:], strict=True):
            for kind, parts in before.items():
                assert all(same_bits(parts[parameter], after[kind][parameter]) for parameter in parts)
        if world > 1 and compresses(case):
            assert "layers.0.weight" not in tuned.before[1]["first"]
            assert "layers.0.weight" in tuned.before[2]["first"]


def unfreeze_where(batch: int, accumulated: int, layers: tuple[int, int]) -> str:
    """What a fit raises when each rank unfreezes its own layer before a batch."""
    model = Regression()
    model.layers[0].requires_grad_(False)
    model.layers[3].requires_grad_(False)
    mine = model.layers[layers[dist.get_rank()]]

    def unfreeze(batch_: object, batch_idx: int) -> None:
        if batch_idx == batch:
            mine.requires_grad_(True)

    model.on_train_batch_start = unfreeze  # type: ignore[method-assign,assignment]
    try:
        fit(strategy_of(INT8), model, batches(STEPS), accumulate_grad_batches=accumulated)
    except (FingerprintError, RuntimeError) as error:
        return str(error)
    return ""


def test_ranks_must_change_alike(pool: WorkerPool) -> None:
    for text in pool.run(unfreeze_where, 2, 2, 1, (0, 3)):
        assert "parameter layers.0." in text
        assert "frozen" in text


@pytest.mark.parametrize(("batch", "refused"), [(1, True), (2, False)])
def test_not_while_gradients_are_accumulated(pool: WorkerPool, batch: int, refused: bool) -> None:
    for text in pool.run(unfreeze_where, 2, batch, 2, (0, 0)):
        assert ("before the first batch of an accumulation window" in text) == refused
        assert bool(text) == refused
