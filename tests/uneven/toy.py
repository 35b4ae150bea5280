"""Fits in which each rank has its own number of batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_commopt import CommOptStrategy, Int8, PowerSGD, Uncompressed
from tests.methods import Case
from tests.pool import trainer
from tests.strategies.toy import Batch, Regression, batches, flat, loader, strategy_of

__all__ = [
    "COUNTS",
    "FITS",
    "METHODS",
    "Ran",
    "Stream",
    "error_of",
    "own_batches",
    "reference",
    "run",
    "train_loader",
    "uneven_fit",
]

COUNTS = ((12, 11, 12), (11, 9, 11))
METHODS = (Case(Uncompressed()), Case(Int8()), Case(PowerSGD(rank=2)))
FITS = [
    pytest.param(METHODS[method], counts, window, id=f"{METHODS[method].method.name}-{counts}-{window}")
    for method, counts, window in (
        (0, COUNTS[0], 1),
        (0, (9, 11), 4),
        (1, COUNTS[1], 1),
        (1, COUNTS[1], 4),
        (2, COUNTS[0], 4),
    )
]
"""Method, batches by rank, and the window of accumulation."""


class Stream(IterableDataset[Any]):
    """Batches without a length."""

    def __init__(self, data: Sequence[Any]) -> None:
        self.data = data

    @override
    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)


def own_batches(counts: Sequence[int], **options: Any) -> list[Batch]:
    """This rank's batches; the first ones are the same whatever their number."""
    return batches(max(counts), **options)[: counts[dist.get_rank()]]


def train_loader(data: Sequence[Any], sized: bool = True) -> "DataLoader[Any]":
    """Ready-made batches in their order, with a length or without."""
    return loader(data) if sized else DataLoader(Stream(data), batch_size=None)


class Watch(pl.Callback):
    """What happens when."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, int]] = []
        self.fetcher = ""

    def _note(self, what: str, trainer: pl.Trainer) -> None:
        self.events.append((what, trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx))

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._note("trained", trainer)
        self.fetcher = type(trainer.fit_loop._data_fetcher).__name__

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._note("validated", trainer)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._note("ended", trainer)


@dataclass
class Ran:
    """What one rank saw of a fit.

    Args:
        parameters: After it.
        steps: Optimizer steps.
        events: ``(what, epoch, batch)``.
        fetcher: Class of the fetcher that was in use.
        planned: ``trainer.num_training_batches``.
    """

    parameters: Tensor
    steps: int
    events: list[tuple[str, int, int]]
    fetcher: str
    planned: float

    def when(self, what: str) -> list[tuple[int, int]]:
        """Epochs and batches of one kind of event."""
        return [(epoch, batch) for kind, epoch, batch in self.events if kind == what]


def run(
    strategy: CommOptStrategy,
    data: Any,
    model: pl.LightningModule | None = None,
    *,
    ckpt_path: Any = None,
    val: int = 2,
    **options: Any,
) -> Ran:
    """Fit two epochs with validation.

    Args:
        strategy: The strategy.
        data: The training loader.
        model: The module; None for an SGD one.
        ckpt_path: To resume from.
        val: Validation batches of this rank.
        options: Of the Trainer.
    """
    watch, model = Watch(), Regression("sgd") if model is None else model
    options = {"max_epochs": 2, "use_distributed_sampler": False, "num_sanity_val_steps": 0} | options
    options["callbacks"] = [watch, *options.pop("callbacks", [])]
    fitter = trainer(dist.get_world_size(), strategy, **options)
    fitter.fit(model, data, loader(batches(val, seed=1)) if val else None, ckpt_path=ckpt_path)
    return Ran(flat(model), fitter.global_step, watch.events, watch.fetcher, fitter.num_training_batches)


def uneven_fit(case: Case, counts: Sequence[int], policy: str, *, sized: bool = True, **options: Any) -> Ran:
    """Fit with the first ``counts[rank]`` batches of each rank."""
    strategy = strategy_of(case, uneven=policy, **options.pop("strategy", {}))
    return run(strategy, train_loader(own_batches(counts), sized), **options)


def error_of(fitting: Any, *args: Any, **options: Any) -> str:
    """Type and text of what a fit raises."""
    try:
        fitting(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def reference(counts: Sequence[int], window: int, epochs: int = 2, true_mean: bool = False) -> Tensor:
    """Parameters after one process trained on the batches of all ranks, in fp64."""
    data = [batches(max(counts), rank=rank)[:count] for rank, count in enumerate(counts)]
    model = Regression("sgd").double()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    for _ in range(epochs):
        for start in range(0, max(counts), window):
            length = min(window, max(counts) - start)
            own = [batch for of_rank in data for batch in of_rank[start : start + length]]
            loss = torch.stack([model.loss((x.double(), y.double())) for x, y in own]).mean()
            optimizer.zero_grad()
            (loss if true_mean else loss * length / window).backward()
            optimizer.step()
    return flat(model)
