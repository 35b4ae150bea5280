"""A fit under DeepSpeed in a worker of the pool."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_commopt import CommOptDeepSpeedStrategy, CommStats
from tests.pool import trainer
from tests.strategies.toy import Batch, Regression, batches, flat, loader

__all__ = ["ZeroFit", "distance", "plain", "zero_fit", "zero_strategy"]

STEPS = 300


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


def plain(steps: int = STEPS, **options: Any) -> ZeroFit:
    """The same under Lightning's DDP."""
    return zero_fit("ddp", data=batches(steps), **options)


def distance(one: Tensor, other: Tensor) -> float:
    """Relative 2-norm of a difference."""
    return float((one - other).norm() / other.norm())
