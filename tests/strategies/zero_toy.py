"""A fit under DeepSpeed in a worker of the pool."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_commopt import CommOptDeepSpeedStrategy, CommStats
from tests.pool import trainer
from tests.strategies.toy import Batch, Regression, batches, flat, loader

__all__ = ["STEPS", "Full", "ZeroFit", "ZeroResume", "resumed", "zero_fit", "zero_strategy"]

STEPS = 60
"""Of the longest fits; `benchmarks/sharded_distance.py` takes 300."""


@dataclass
class ZeroFit:
    """What a rank saw of a fit: parameters after it, validation losses, statistics."""

    parameters: Tensor
    steps: int
    stats: CommStats | None
    validated: list[float]
    explain: str = ""


class Full(pl.Callback):
    """Copies all parameters before DeepSpeed is gone, and counts validation."""

    def __init__(self) -> None:
        self.parameters = Tensor()
        self.validated: list[float] = []
        self.explain = ""

    @override
    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.validated.append(float(outputs))

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with gathered(pl_module):
            self.parameters = flat(pl_module)
        if isinstance(trainer.strategy, CommOptDeepSpeedStrategy):
            self.explain = trainer.strategy.explain()


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """All of the parameters that ZeRO shards."""
    if not any(hasattr(p, "ds_id") for p in module.parameters()):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        yield


def zero_strategy(stage: int, compression: Any = "none", **options: Any) -> CommOptDeepSpeedStrategy:
    """The strategy with small buckets: each weight matrix of the model is one."""
    return CommOptDeepSpeedStrategy(stage, compression, **({"reduce_bucket_size": 4100, "start_step": 0} | options))


def zero_fit(
    strategy: Any,
    model: pl.LightningModule | None = None,
    data: Sequence[Batch] | None = None,
    ckpt_path: Any = None,
    validate: bool = False,
    **options: Any,
) -> ZeroFit:
    """Fit one epoch of ready-made batches in every rank of the run."""
    full = Full()
    model = model or Regression()
    data = batches(STEPS) if data is None else data
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitter = trainer(
            dist.get_world_size(),
            strategy,
            **({"max_epochs": 1, "use_distributed_sampler": False, "callbacks": [full]} | options),
        )
        fitter.fit(model, loader(data), loader(data[:2]) if validate else None, ckpt_path=ckpt_path)
    ours = fitter.strategy
    stats = ours.comm_stats() if isinstance(ours, CommOptDeepSpeedStrategy) else None
    return ZeroFit(full.parameters, fitter.global_step, stats, full.validated, full.explain)


class SaveAt(pl.Callback):
    """Saves when an epoch ends, and copies the parameters."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parameters = Tensor()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)
        with gathered(pl_module):
            self.parameters = flat(pl_module)


@dataclass
class ZeroResume:
    """A resumed run.

    Args:
        fits: Parameters after two epochs by method: in one go, and with a new Trainer for the second one.
        saved: Those in the checkpoint.
        validated: Losses of a Trainer that loads them without a fit, or what it is told instead.
    """

    fits: dict[str, tuple[Tensor, Tensor]]
    saved: Tensor
    validated: "list[float] | str"


def resumed(stage: int, folder: Path) -> ZeroResume:
    """Fit two epochs in one go, and with a checkpoint between them."""
    fits, data = {}, batches(4)
    for method in ("none", "int4"):
        straight = zero_fit(zero_strategy(stage, method), data=data, max_epochs=2)
        save = SaveAt(folder / method)
        zero_fit(zero_strategy(stage, method), data=data, callbacks=[save])
        continued = zero_fit(
            zero_strategy(stage, method), Regression(seed=7), data, ckpt_path=folder / method, max_epochs=2
        )
        fits[method] = straight.parameters, continued.parameters
    full = Full()
    fresh = trainer(dist.get_world_size(), zero_strategy(stage), callbacks=[full], use_distributed_sampler=False)
    try:
        fresh.validate(Regression(seed=7), loader(batches(2)), ckpt_path=folder / "int4", verbose=False)
    except ValueError as error:
        return ZeroResume(fits, save.parameters, str(error))
    return ZeroResume(fits, save.parameters, full.validated)
