"""A script that users could have written: `python zero_launched.py CONFIG FOLDER`, by any launcher.

It fits, validates and leaves a file of each rank with what it saw; then rank 1 is killed in a second fit.
"""

import json
import os
import signal
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_commopt import CommOptDeepSpeedStrategy
from lightning_commopt.zero.consolidate import consolidate

warnings.filterwarnings("ignore")
ONE_FILE, RATE, STEPS = "one.ckpt", 0.05, 8


class Net(pl.LightningModule):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Tanh(), torch.nn.Linear(48, 8))

    def loss(self, batch: Tensor) -> Tensor:
        loss: Tensor = (self.layers(batch) - batch[:, :8]).square().mean()
        return loss

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), RATE)


def loader(seed: int, batches: int = STEPS) -> "DataLoader[Tensor]":
    """Batches of four samples."""
    samples = torch.randn(4 * batches, 64, generator=torch.Generator().manual_seed(seed))
    return DataLoader(list(samples), batch_size=4)  # type: ignore[arg-type]


class Killed(pl.Callback):
    """Rank 1 ends without a word."""

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *args: object) -> None:
        if trainer.global_rank == 1 and args[-1] == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def main(config: str, folder: Path) -> None:
    """Fit twice, the second time in vain."""
    cli = LightningCLI(Net, args=["--config", config], run=False, save_config_callback=None)
    trainer, strategy = cli.trainer, cli.trainer.strategy
    assert isinstance(strategy, CommOptDeepSpeedStrategy)
    checkpoint = trainer.checkpoint_callback
    assert checkpoint is not None
    trainer.fit(cli.model, loader(0, 2 * STEPS), loader(9, 2))
    losses = [row["val_loss"] for row in trainer.validate(cli.model, loader(9, 2), verbose=False)]
    rank_zero_only(consolidate)(checkpoint.best_model_path, folder / ONE_FILE)
    stats = strategy.comm_stats()
    seen = {
        "val_loss": losses[0],
        "steps": trainer.global_step,
        "ratio": stats.compression_ratio,
        "world": stats.world_size,
    }
    (folder / f"{trainer.global_rank}.json").write_text(json.dumps(seen))
    trainer.callbacks.append(Killed())
    trainer.fit_loop.max_epochs = 4
    trainer.fit(cli.model, loader(0, 2 * STEPS), loader(9, 2))
    (folder / "not_ended").touch()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
