"""Models and optimizers that people have: replicas stay bit-equal, and training goes as under stock DDP."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from typing_extensions import override

from lightning_commopt import Int8, Uncompressed
from tests.methods import Case
from tests.pool import WorkerPool
from tests.strategies.toy import (
    SMALL_BUCKETS,
    Batch,
    Fit,
    Regression,
    batches,
    compresses,
    each_method,
    fit,
    flat,
    strategy_of,
)

pytestmark = pytest.mark.runs("commopt", "kinds of models")

STEPS = 8


class Frozen(Regression):
    """The first layer does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)
        self.before = self.get_parameter("layers.0.weight").clone()

    @override
    def on_train_end(self) -> None:
        assert torch.equal(self.get_parameter("layers.0.weight"), self.before)


class Tied(Regression):
    """One weight matrix at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 60))
        self.layers[4].weight = self.layers[2].weight

    @override
    def loss(self, batch: Batch) -> Tensor:
        loss: Tensor = (self.layers(batch[0])[:, :40] - batch[1]).square().mean()
        return loss

    @override
    def on_train_end(self) -> None:
        assert self.layers[4].weight is self.layers[2].weight


class Convolutional(Regression):
    """Weights in channels-last memory, batch normalisation with its buffers."""

    def __init__(self) -> None:
        super().__init__()
        body = nn.Sequential(
            nn.Conv2d(10, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 10, 3, padding=1)
        )
        self.layers = body.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @override
    def loss(self, batch: Batch) -> Tensor:
        images = batch[0].view(-1, 10, 2, 2).contiguous(memory_format=torch.channels_last)
        return F.mse_loss(self.layers(images), batch[1].view(-1, 10, 2, 2))

    @override
    def on_train_end(self) -> None:
        for weight in (self.get_parameter("layers.0.weight"), self.get_parameter("layers.3.weight")):
            assert weight.is_contiguous(memory_format=torch.channels_last)
            assert not weight.is_contiguous()


class QuasiNewton(Regression):
    """LBFGS, which calls its closure several times a step."""

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.05, max_iter=3)


class Branching(Regression):
    """A second output layer that rank 1 uses in odd steps and nobody else ever."""

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.never = nn.Linear(40, 40), nn.Linear(40, 40)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 1 and batch_idx % 2:
            loss = loss + 0.1 * self.extra(batch[0]).square().mean()
        return loss


@dataclass
class Kind:
    """A model, how to fit it, and how many rounds its steps take."""

    model: Callable[[], Regression]
    strategy: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    rounds_a_step: int = 1


KINDS = {
    "plain": Kind(Regression),
    "SGD": Kind(partial(Regression, "sgd")),  # Adam hides a factor on gradients
    "views": Kind(Regression, {"gradient_as_bucket_view": True}),
    "clipped": Kind(Regression, trainer={"gradient_clip_val": 0.1}),
    "clipped by value": Kind(Regression, trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "frozen": Kind(Frozen),
    "tied": Kind(Tied),
    "convolutional": Kind(Convolutional),
    "LBFGS": Kind(QuasiNewton, rounds_a_step=3),
    "branching": Kind(Branching, {"find_unused_parameters": True}),
    "branching, views": Kind(Branching, {"find_unused_parameters": True, "gradient_as_bucket_view": True}),
}


THOROUGH = ("none", "int8", "powersgd")
"""Methods that meet all kinds; the others meet those that change what is encoded."""

ENCODED = ("plain", "SGD", "views", "convolutional", "branching", "branching, views")


def fit_kinds(case: Case | None) -> dict[str, Fit]:
    """Every kind for stock DDP (None) and thorough methods."""
    results = {}
    for name, kind in KINDS.items():
        if case is not None and case.method.name not in THOROUGH and name not in ENCODED:
            continue
        options = {**SMALL_BUCKETS, **kind.strategy}
        strategy = DDPStrategy(**options) if case is None else strategy_of(case, **options)
        results[name] = fit(strategy, kind.model(), batches(STEPS), **kind.trainer)
    return results


@pytest.fixture(scope="module")
def stock(pool: WorkerPool) -> Callable[[int], list[dict[str, Fit]]]:
    """The fits under stock DDP, of a world size."""
    return cache(lambda world: pool.run(fit_kinds, world, None))


@each_method()
def test_models_train_as_under_ddp(pool: WorkerPool, case: Case, world: int, stock: Any) -> None:
    ranks = pool.run(fit_kinds, world, case)
    for rank, kinds in enumerate(ranks):
        for name, ran in kinds.items():
            assert torch.equal(ran.parameters, ranks[0][name].parameters), name
            assert_near(case, name, ran, stock(world)[rank][name])
            assert ran.stats is not None
            assert ran.stats.rounds == STEPS * KINDS[name].rounds_a_step, name
            if compresses(case):
                assert ran.stats.hook_calls == ran.buckets * ran.stats.rounds
                assert ran.stats.applied_steps == STEPS
                assert ran.stats.promised.total == ran.stats.sent_bytes
        assert torch.equal(kinds["views"].parameters, kinds["plain"].parameters)
        assert torch.equal(kinds["branching, views"].parameters, kinds["branching"].parameters)


def assert_near(case: Case, name: str, ran: Fit, stock: Fit) -> None:
    """`none` is stock DDP; methods of 4 bit or more end within a tenth of what it gained.

    LBFGS takes noise for curvature: there the loss must fall. Eight steps are too few to ask it of coarser methods.
    """
    assert ran.parameters.isfinite().all()
    if not compresses(case):
        assert torch.equal(ran.parameters, stock.parameters), name
        return
    last, reference = torch.tensor(ran.losses[-3:]).mean(), torch.tensor(stock.losses[-3:]).mean()
    gained = stock.losses[0] - reference
    assert gained > 0, name
    if case.method.loss_safety == "C":
        return
    if name == "LBFGS":
        assert last < ran.losses[0]
    else:
        assert (last - reference).abs() < 0.1 * gained, (name, (last - reference) / gained)


# ---- wrappers and callbacks of others -------------------------------------------------------------------------------


class Thawing(Regression):
    """The first layer trains from the third batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.layers[0].requires_grad_(True)


def fit_compiled(case: Case) -> tuple[Fit, Fit]:
    """Compiled, and as it is; DDPOptimizer needs buckets of its usual size."""
    compiled, plain = (strategy_of(case, bucket_cap_mb=25) for _ in range(2))
    return (
        fit(compiled, torch.compile(Thawing(), backend="aot_eager"), batches(4)),  # type: ignore[arg-type]
        fit(plain, Thawing(), batches(4)),
    )


def test_compiled_is_the_same(pool: WorkerPool) -> None:
    for compiled, plain in pool.run(fit_compiled, 2, Case(Int8())):
        assert torch.equal(compiled.parameters, plain.parameters)
        assert compiled.stats is not None
        assert plain.stats is not None
        assert compiled.stats.hook_calls == plain.stats.hook_calls == 4


AVERAGING: dict[str, Callable[[], Callback]] = {
    "SWA": lambda: StochasticWeightAveraging(1e-3, swa_epoch_start=2),
    "EMA": lambda: EMAWeightAveraging(decay=0.5),
}


def fit_averaged() -> dict[str, list[Fit]]:
    """Each callback under stock DDP, `none` and int8; int8 without it comes last."""
    results = {}
    for name, averaging in AVERAGING.items():
        strategies = [DDPStrategy(**SMALL_BUCKETS), strategy_of(Case(Uncompressed())), strategy_of(Case(Int8()))]  # type: ignore[arg-type]
        fits = [fit(s, Regression(), batches(4), max_epochs=4, callbacks=[averaging()]) for s in strategies]
        results[name] = [*fits, fit(strategy_of(Case(Int8())), Regression(), batches(4), max_epochs=4)]
    return results


def test_averaged_weights_are_those_of_ddp(pool: WorkerPool) -> None:
    zero, one = pool.run(fit_averaged, 2)
    start = flat(Regression())
    for name, (stock, none, int8, plain) in zero.items():
        assert torch.equal(none.parameters, stock.parameters), name
        assert torch.equal(int8.parameters, one[name][2].parameters), name
        assert not torch.equal(int8.parameters, plain.parameters), name
        assert (int8.parameters - stock.parameters).norm() < 0.25 * (stock.parameters - start).norm(), name
