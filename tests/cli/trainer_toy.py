"""A user's script: a small classifier, and functions that make a Trainer for it."""

import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES = 128


def samples() -> TensorDataset:
    """Points, and which of their coordinates is the largest."""
    points = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(points, points[:, :4].argmax(1))


class Net(LightningModule):
    """A classifier that reads its batch size from an attribute; `sizes` are those that it was trained with."""

    sizes: list[int]
    fits = 10_000  # samples

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.batch_size = 4
        self.sizes = []
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        points, labels = batch
        if len(points) > self.fits:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        self.sizes.append(len(points))
        return nn.functional.cross_entropy(self.layers(points), labels)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        raise AssertionError("there is nothing to validate with")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(), batch_size=self.batch_size, shuffle=True, drop_last=True)


class ByRank(Net):
    """A model whose loss depends on the rank."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + self.global_rank)


class Failing(Net):
    """A model with a mistake in its step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        raise KeyError("labels")


class Exiting(Net):
    """A model that ends the process."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        sys.exit(3)


MADE: list[Net] = []


def make_trainer() -> tuple[Trainer, Net]:
    """Two processes, under Lightning's own DDP."""
    MADE.append(Net())
    return Trainer(strategy="ddp", accelerator="cpu", devices=2, max_epochs=2, enable_progress_bar=False), MADE[-1]


def make_by_rank() -> tuple[Trainer, Net]:
    """A run that one process would not repeat."""
    return Trainer(strategy="ddp", accelerator="cpu", devices=2, max_epochs=2), ByRank()


def make_small_memory() -> tuple[Trainer, Net]:
    """A device that holds 8 samples."""
    trainer, net = make_trainer()
    net.fits = 8
    return trainer, net


def make_with_loader() -> tuple[Trainer, Net, DataLoader[Any]]:
    """Data beside the model."""
    trainer, net = make_trainer()
    del net.batch_size
    return trainer, net, DataLoader(samples(), batch_size=4)


def make_two() -> tuple[Trainer, Net]:
    """A Trainer too many."""
    make_trainer()
    return make_trainer()


def make_trainer_alone() -> Trainer:
    """A Trainer without a model."""
    return make_trainer()[0]


def make_fitted() -> object:
    """Trains, which it must not."""
    trainer, model = make_trainer()
    trainer.fit(model)
    return trainer, model


def make_raising() -> None:
    """What a mistake in a script looks like."""
    raise ValueError("no data")


def make_failing() -> tuple[Trainer, Net]:
    """A run that fails in its first step."""
    return Trainer(strategy="ddp", accelerator="cpu", devices=2, max_epochs=2), Failing()


def make_failing_alone() -> tuple[Trainer, Net]:
    """The same in one process."""
    return Trainer(accelerator="cpu", devices=1, max_epochs=2, logger=False), Failing()


def make_exiting() -> tuple[Trainer, Net]:
    """A run that ends the process in its first step."""
    return Trainer(accelerator="cpu", devices=1, max_epochs=2, logger=False), Exiting()


def make_leaving() -> None:
    """What a script does that looks at its arguments."""
    sys.exit("no data")
