"""A small model in which faults can be planted, and one examined fit of it in a worker of the pool."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from typing_extensions import override

from lightning_commopt.callbacks import DistributedDoctor, Finding
from tests.pool import trainer

__all__ = ["Examined", "Net", "Samples", "answers", "data", "examine", "found", "seed_streams"]

STEPS = 8


class Samples(TensorDataset):
    """Random vectors of eight numbers.

    Args:
        count: Samples.
        seed: Of their values.
    """

    def __init__(self, count: int, seed: int = 1) -> None:
        super().__init__(torch.randn(count, 8, generator=torch.Generator().manual_seed(seed)))


class Net(pl.LightningModule):
    """Two layers with dropout and a buffer that changes; subclasses plant faults."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)
        self.lr = lr
        self.losses: list[float] = []

    def loss(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.norm(self.first(x)).tanh(), 0.1, self.training)
        loss: Tensor = (self.second(hidden) - x).square().mean()
        return loss

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch[0])
        self.losses.append(loss.item())
        return loss

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)


@dataclass
class Examined:
    """What one rank saw of a fit.

    Args:
        findings: Of the doctor.
        printed: Nothing; the pool keeps the output.
        parameters: After the fit, in one vector.
        losses: Of each batch of this rank.
        streams: The random streams after the fit, as numbers drawn from them.
    """

    findings: list[Finding]
    parameters: Tensor
    losses: list[float]
    streams: tuple[float, float, float]


def seed_streams(offset: int) -> None:
    """Give a rank its own random numbers."""
    torch.manual_seed(100 + offset)
    np.random.seed(100 + offset)
    random.seed(100 + offset)


def data(count: int = 16 * STEPS, dataset: "Dataset[Any] | None" = None, **options: Any) -> "DataLoader[Any]":
    """A loader of eight batches for each of two ranks."""
    return DataLoader(Samples(count) if dataset is None else dataset, batch_size=8, **options)


def examine(
    model: pl.LightningModule,
    loader: Any = None,
    strategy: Any = "ddp",
    doctor: DistributedDoctor | None = None,
    callbacks: Sequence[pl.Callback] = (),
    **options: Any,
) -> Examined:
    """Fit one epoch with a doctor; random streams are as they should be, unless a test has changed that."""
    fitter = trainer(
        dist.get_world_size() if dist.is_initialized() else 1,
        strategy,
        callbacks=[*callbacks, *([] if doctor is None else [doctor])],
        **({"max_epochs": 1} | options),
    )
    fitter.fit(model, data() if loader is None else loader)
    streams = float(torch.rand(())), float(np.random.rand()), random.random()
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    return Examined(doctor.findings if doctor else [], parameters, getattr(model, "losses", []), streams)


def answers(findings: Sequence[Finding], check: str) -> list[Finding]:
    """All that one check says."""
    return [finding for finding in findings if finding.check == check]


def found(findings: Sequence[Finding]) -> list[Finding]:
    """What is wrong."""
    return [finding for finding in findings if finding.found]
