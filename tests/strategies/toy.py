"""A small model, its data, and one fit of it in a worker of the pool."""

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_commopt import CommOptStrategy, CommStats, Uncompressed
from tests.methods import CASES, Case
from tests.pool import trainer

__all__ = [
    "SMALL_BUCKETS",
    "Batch",
    "ByHand",
    "Fit",
    "Regression",
    "ScaledFP32",
    "batches",
    "compresses",
    "distance",
    "each_method",
    "each_route",
    "fit",
    "flat",
    "fresh_loop",
    "loader",
    "same_bits",
    "state_of",
    "strategy_of",
    "tensors_of",
]

Batch = tuple[Tensor, Tensor]

_NOT_OURS = (
    "You defined a `validation_step` but have no `val_dataloader`",
    "`isinstance(treespec, LeafSpec)` is deprecated",
    "does not have many workers",
    "is smaller than the logging interval",
)

SMALL_BUCKETS = {"bucket_cap_mb": 0.008}
"""Buckets of 8.4 kB: each weight matrix of :class:`Regression` has one of its own."""


class Regression(pl.LightningModule):
    """Three weight matrices of 2680, 4087 and 2440 elements (no multiples of a block or of a world), a norm, biases.

    Args:
        optimizer: ``"sgd"``, ``"adamw"`` or ``"fused"`` (AdamW).
        spoilt: ``(rank, step)`` whose loss is multiplied by ``factor``; None for no such step.
        factor: ``inf`` or ``nan``.
        seed: Of the weights.
    """

    def __init__(
        self,
        optimizer: str = "adamw",
        *,
        spoilt: tuple[int, int] | None = None,
        factor: float = float("inf"),
        seed: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Linear(40, 67), nn.LayerNorm(67), nn.Tanh(), nn.Linear(67, 61), nn.Tanh(), nn.Linear(61, 40)
        )
        self.optimizer = optimizer
        self.spoilt = spoilt
        self.factor = factor
        self.losses: list[float] = []

    def loss(self, batch: Batch) -> Tensor:
        """Mean squared error."""
        loss: Tensor = (self.layers(batch[0]) - batch[1]).square().mean()
        return loss

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss * self.factor if self.spoilt == (self.global_rank, batch_idx) else loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(batch)

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(batch)

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        predicted: Tensor = self.layers(batch[0])
        return predicted

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), 1.0)
        return torch.optim.AdamW(self.parameters(), 3e-3, fused=self.optimizer == "fused")


class ByHand(Regression):
    """The same under manual optimisation."""

    def __init__(self, optimizer: str = "adamw", **options: Any) -> None:
        super().__init__(optimizer, **options)
        self.automatic_optimization = False

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


def batches(count: int, *, rows: int = 8, seed: int = 0, rank: int | None = None) -> list[Batch]:
    """``count`` batches that differ between ranks; the target is learnable.

    Args:
        count: Number of batches.
        rows: Rows of one.
        seed: Of the data.
        rank: Whose batches; None for this rank's.
    """
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    inputs = torch.randn(count, rows, 40, generator=generator)
    return [(x, x.flip(-1).sin()) for x in inputs]


def loader(data: Sequence[Any]) -> "DataLoader[Any]":
    """Ready-made batches, in their order."""
    return DataLoader(data, batch_size=None)  # type: ignore[arg-type]  # a list is a dataset


def strategy_of(case: Case, **options: Any) -> CommOptStrategy:
    """The strategy with small buckets, active from the first step; what means nothing to ``none`` is dropped for it."""
    options = {**SMALL_BUCKETS, "start_step": 0, "hierarchy": case.hierarchy or "auto", **options}
    if isinstance(case.method, Uncompressed):
        options = {k: v for k, v in options.items() if k not in ("start_step", "nonfinite", "hierarchy")}
    return CommOptStrategy(case.method, **options)


def compresses(case: Case) -> bool:
    """Whether gradients take our path."""
    return not isinstance(case.method, Uncompressed)


def each_route(which: Callable[[Case], bool] = lambda case: True) -> pytest.MarkDecorator:
    """Parametrises a test by `case` and `world`, so that each method and each way of travelling is met.

    Casts and int8 run on two ranks (one hop), int4 and coarser methods on three (two hops, or an all-reduce),
    hierarchies on their four. What belongs to a codec on other ranks is tested by the laws.
    """
    return _by_case_and_world([(c, _ranks(c)) for c in CASES if which(c) and not c.engine_only])


def _ranks(case: Case) -> int:
    one_hop = case.method.loss_safety == "A" or case.method.name == "int8"
    return 4 if case.hierarchy else 2 if one_hop else 3


def each_method(which: Callable[[Case], bool] = lambda case: True) -> pytest.MarkDecorator:
    """Parametrises a test by `case` and `world`: every method once, on two ranks."""
    return _by_case_and_world([(c, 2) for c in CASES if which(c) and not c.hierarchy and not c.engine_only])


def _by_case_and_world(chosen: list[tuple[Case, int]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("case", "world"), [pytest.param(c, w, id=f"{c.id}-{w}") for c, w in chosen])


def distance(one: Tensor, other: Tensor) -> float:
    """Relative 2-norm of the difference."""
    return float((one - other).norm() / other.norm())


def flat(module: nn.Module) -> Tensor:
    """All parameters in one vector, in the widest type, so that no bit is lost."""
    return torch.cat([p.detach().double().flatten() for p in module.parameters()])


class ScaledFP32(MixedPrecision):
    """A gradient scaler over fp32 arithmetic: a power of two then changes no bit.

    Args:
        scale: The loss scale.
        halved_after: Steps after which it is halved; None for never.
    """

    def __init__(self, scale: float, halved_after: int | None = None) -> None:
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10_000))
        self.halved_after = halved_after

    @contextlib.contextmanager
    @override
    def forward_context(self) -> Iterator[None]:
        yield

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        assert self.scaler is not None
        if self.halved_after is not None:
            self.halved_after -= 1
            if self.halved_after == 0:
                self.scaler.update(self.scaler.get_scale() / 2)
        return output


@dataclass
class Fit:
    """What one rank saw of a fit.

    Args:
        parameters: Of the model, after it.
        losses: Of each batch.
        steps: ``trainer.global_step``.
        stats: ``strategy.comm_stats()``, None under a stock strategy.
        buckets: Buckets of DDP's reducer at the end of training.
        hook: Name of DDP's communication hook, empty when there is none.
        warnings: Texts of all warnings, without Lightning's advice about tiny data sets and its deprecated calls.
        explain: ``strategy.explain()`` at the end of training.
    """

    parameters: Tensor
    losses: list[float]
    steps: int
    stats: CommStats | None
    buckets: int
    hook: str
    explain: str
    warnings: list[str] = field(default_factory=list)


class Look(pl.Callback):
    """Reads what is gone after the fit."""

    def __init__(self) -> None:
        self.buckets, self.hook, self.explain = 0, "", ""

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        if isinstance(strategy.model, DistributedDataParallel):
            self.buckets = len(strategy.model.reducer._get_zeros_like_grad_buckets())
            self.hook = strategy.model._get_ddp_logging_data().get("comm_hook", "")
        if isinstance(strategy, CommOptStrategy):
            self.explain = strategy.explain()


def fit(
    strategy: "str | DDPStrategy", model: pl.LightningModule, data: Sequence[Any], ckpt_path: Any = None, **options: Any
) -> Fit:
    """Fit one epoch of ready-made batches in every rank of the run, and tell what happened."""
    look = Look()
    options["callbacks"] = [look, *options.pop("callbacks", [])]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitter = trainer(
            dist.get_world_size(), strategy, **({"max_epochs": 1, "use_distributed_sampler": False} | options)
        )
        fitter.fit(model, loader(data), ckpt_path=ckpt_path)
    ours = fitter.strategy
    stats = ours.comm_stats() if isinstance(ours, CommOptStrategy) else None
    losses = list(getattr(model, "losses", []))
    texts = [text for w in caught if not any(known in (text := str(w.message)) for known in _NOT_OURS)]
    return Fit(flat(model), losses, fitter.global_step, stats, look.buckets, look.hook, look.explain, texts)


def fresh_loop(fitter: pl.Trainer) -> "pl.loops.fit_loop._FitLoop":
    """A fit loop that has not begun, for another fit of one Trainer."""
    old = fitter.fit_loop
    return type(old)(fitter, min_epochs=old.min_epochs, max_epochs=old.max_epochs)


def state_of(strategy: object) -> dict[str, Any]:
    """A copy of all training state of this rank's exchange; empty where there is none."""
    path = getattr(strategy, "_path", None)
    return {} if path is None else copy.deepcopy(path.state())


def tensors_of(state: Any) -> list[Tensor]:
    """All tensors of a nested state, in its order."""
    if isinstance(state, Tensor):
        return [state]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def same_bits(one: Any, other: Any) -> bool:
    """Whether two states hold the same tensors."""
    return all(torch.equal(a, b) for a, b in zip(tensors_of(one), tensors_of(other), strict=True))
