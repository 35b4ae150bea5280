"""Fits of a small model on two nodes of two ranks, in a worker of the pool."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_commopt import CommOptShardedStrategy, CommStats
from tests.pool import trainer
from tests.strategies.toy import Batch, Regression, loader

__all__ = ["Idle", "OwnSharding", "ShardedFit", "fit_sharded", "sharded", "whole"]


class OwnSharding(Regression):
    """Shards itself in `configure_model`.

    Args:
        wrong: ``""``, ``"mesh"`` (both dimensions), ``"parameter"`` (the last layer belongs to no group) or ``"fp16"``
            (reduced in it).
    """

    def __init__(self, wrong: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.wrong = wrong

    @override
    def configure_model(self) -> None:
        assert self.device_mesh is not None
        mesh = self.device_mesh if self.wrong == "mesh" else self.device_mesh["shard"]
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float16) if self.wrong == "fp16" else MixedPrecisionPolicy()
        layers = [layer for layer in self.layers if any(True for _ in layer.parameters())]
        for layer in layers[:-1] if self.wrong == "parameter" else layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        if self.wrong != "parameter":
            fully_shard(self.layers, mesh=mesh, mp_policy=policy)


class Idle(Regression):
    """Never uses one layer, and another only now and then; all weights decay.

    In all batches that are ``0`` modulo ``every`` the other one is used: by all ranks, or by the ``rank`` given.
    """

    every, rank = 2, -1

    def __init__(self, optimizer: str = "adamw", **options: Any) -> None:
        super().__init__(optimizer, **options)
        self.never = nn.Linear(50, 50)
        self.sometimes = nn.Linear(40, 60)

    @override
    def loss(self, batch: Batch) -> Tensor:
        loss = super().loss(batch)
        used = len(self.losses) % self.every == 0 and self.rank in (-1, self.global_rank)
        return loss + 0.1 * self.sometimes(batch[0]).square().mean() if used else loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), 3e-3, weight_decay=0.5)
        return torch.optim.SGD(self.parameters(), 0.5, momentum=0.9, weight_decay=0.1)


@dataclass
class ShardedFit:
    """What one rank saw of a fit.

    Args:
        parameters: The whole parameters after it.
        losses: Of each batch.
        steps: ``trainer.global_step``.
        stats: ``strategy.comm_stats()``; None under another strategy.
        explain: ``strategy.explain()``.
        groups: Names of the parameters of each FSDP2 group.
        metrics: What was logged.
        warnings: Texts of all warnings.
    """

    parameters: Tensor
    losses: list[float]
    steps: int
    stats: CommStats | None
    explain: str
    groups: list[list[str]]
    metrics: dict[str, float]
    warnings: list[str] = field(default_factory=list)


def sharded(method: Any = "int8", **options: Any) -> CommOptShardedStrategy:
    """The strategy with a group for each weight matrix of the model, active from the first step."""
    if method != "none":
        options = {"start_step": 0, **options}
    return CommOptShardedStrategy(method, **{"wrap": 2000, **options})


def whole(module: nn.Module) -> Tensor:
    """All parameters in one vector, gathered from all shards. A collective."""
    parameters = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
    return torch.cat([p.detach().double().flatten() for p in parameters])


def fit_sharded(
    strategy: "str | Strategy",
    model: pl.LightningModule,
    data: Sequence[Any],
    ckpt_path: Any = None,
    validation: Sequence[Any] | None = None,
    **options: Any,
) -> ShardedFit:
    """Fit ready-made batches on two nodes, and tell what happened."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        defaults = {"max_epochs": 1, "use_distributed_sampler": False, "num_nodes": 2}
        fitter = trainer(dist.get_world_size(), strategy, **(defaults | options))
        loaders = loader(data), None if validation is None else loader(validation)
        fitter.fit(model, *loaders, ckpt_path=ckpt_path)
    ours = fitter.strategy if isinstance(fitter.strategy, CommOptShardedStrategy) else None
    return ShardedFit(
        parameters=whole(model),
        losses=list(getattr(model, "losses", [])),
        steps=fitter.global_step,
        stats=None if ours is None else ours.comm_stats(),
        explain="" if ours is None else ours.explain(),
        groups=[] if ours is None or ours._shards is None else [[p.name for p in g.parameters] for g in ours._shards],
        metrics={name: float(value) for name, value in fitter.callback_metrics.items()},
        warnings=[str(w.message) for w in caught],
    )
