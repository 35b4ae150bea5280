"""How many samples an optimizer step sees."""

from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader

__all__ = ["EffectiveBatch", "effective_batch"]


@dataclass(frozen=True)
class EffectiveBatch:
    """Samples of one optimizer step.

    Args:
        per_device: Samples of one batch on one device, the mean over ranks.
        replicas: Data-parallel ranks.
        accumulated: Batches whose gradients are accumulated.

    """

    per_device: float
    replicas: int
    accumulated: int

    @property
    def size(self) -> float:
        """Samples on all ranks."""
        return self.per_device * self.replicas * self.accumulated

    def accumulating(self, batches: int) -> "EffectiveBatch":
        """Return the same with another accumulation."""
        return replace(self, accumulated=batches)

    def __str__(self) -> str:
        ranks = "1 rank" if self.replicas == 1 else f"{self.replicas} ranks"
        return f"{self.size:g} ({self.per_device:g} per device x {ranks} x {self.accumulated} accumulated)"


def effective_batch(trainer: "pl.Trainer", per_device: int | None = None) -> EffectiveBatch:
    """Return the effective batch of a Trainer that is about to train, the same on all ranks. A collective.

    Args:
        trainer: Its training data is set up.
        per_device: Samples of one batch on this device; None to ask the DataLoader.

    Raises:
        ValueError: The training data does not tell its batch size.

    """
    samples = _batch_size(trainer.train_dataloader) if per_device is None else per_device
    strategy = trainer.strategy
    on_all, ranks = strategy.reduce(torch.tensor([samples, 1], device=strategy.root_device), reduce_op="sum").tolist()
    return EffectiveBatch(on_all / ranks, _data_parallel_ranks(trainer), _accumulated(trainer))


def _batch_size(loaders: Any) -> int:
    """Return the batch size of the only DataLoader."""
    flat = CombinedLoader(loaders).flattened
    if len(flat) > 1:
        raise ValueError(
            f"`LinearLRScaling` cannot tell the batch size: training draws from {len(flat)} DataLoaders. Say how many "
            "samples of a device count for one batch with `batch_size_per_device`."
        )
    for source in (flat[0], getattr(flat[0], "batch_sampler", None)):
        size = getattr(source, "batch_size", None)
        if isinstance(size, int) and size > 0:
            return size
    raise ValueError(
        f"`LinearLRScaling` cannot tell the batch size: the training data (`{type(flat[0]).__name__}`) has no "
        "`batch_size` and no `batch_sampler.batch_size`. Say how many samples a device gets in one batch with "
        "`batch_size_per_device`."
    )


def _data_parallel_ranks(trainer: "pl.Trainer") -> int:
    """Return the number of ranks that get different data; with model parallelism it is not the world size."""
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return int(sampler.get("num_replicas") or trainer.world_size)


def _accumulated(trainer: "pl.Trainer") -> int:
    """Return the accumulation of the epoch that is about to begin."""
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            return callback.get_accumulate_grad_batches(trainer.current_epoch)
    return trainer.accumulate_grad_batches
