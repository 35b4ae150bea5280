"""What torchrun runs and restarts: in its first attempt one rank sends itself a signal."""

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_commopt import CommOptStrategy, Int8

EPOCHS, STEPS = 3, 4
"""Epochs of a fit, and steps of an epoch."""


class SignalsItself(pl.Callback):
    """Kills or stops this process, in the middle of the second epoch."""

    def __init__(self, name: str) -> None:
        self.number = signal.Signals[name]

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == STEPS + 2:
            os.kill(os.getpid(), self.number)


class Small(pl.LightningModule):
    """One compressed matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(64, 48)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = (self.layer(batch) - batch[:, :48].sin()).square().mean()
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)


def train(folder: Path, fault: str | None = None, **options: Any) -> str:
    """Fit, from `last` where there is one, with Lightning's own sampler.

    Args:
        folder: Of the checkpoints.
        fault: Name of the signal that this rank sends itself, if any.
        options: Of the Trainer.

    Returns:
        A digest of the parameters.

    """
    model = Small()
    data = torch.randn(8 * STEPS * 2, 64, generator=torch.Generator().manual_seed(2))
    trainer = pl.Trainer(
        strategy=CommOptStrategy(Int8(block=128), start_step=0),
        accelerator="cpu",
        devices=2,
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, save_last=True), *([SignalsItself(fault)] if fault else [])],
        **options,
    )
    trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True), ckpt_path="last")  # type: ignore[arg-type]
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def main(folder: Path, victim: int, fault: str) -> None:
    """Fit in one of torchrun's workers, and leave a digest of the parameters."""
    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    digest = train(folder, fault if attempt == "0" and rank == str(victim) else None)
    (folder / f"rank{rank}.attempt{attempt}").write_text(digest)
