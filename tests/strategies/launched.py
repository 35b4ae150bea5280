"""A script that users could have written: `python launched.py FOLDER LAUNCH [LAUNCH ...]`.

Each rank leaves a file with what it saw.
"""

import hashlib
import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_commopt import CommOptStrategy, Int8, PowerSGD

LAUNCHES: dict[str, tuple[str | CommOptStrategy, int]] = {
    "fork": (CommOptStrategy(Int8(block=128), start_method="fork"), 2),
    "notebook": ("commopt_int8_notebook", 2),
    "spawn": (CommOptStrategy(PowerSGD(rank=2), start_method="spawn"), 2),
    "fork-nodes": (CommOptStrategy(Int8(block=128), hierarchy=2, start_method="fork"), 4),
}


class Report(pl.Callback):
    """Writes down what this rank has when training ends."""

    def __init__(self, folder: Path, launch: str) -> None:
        self.folder = folder
        self.launch = launch

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, CommOptStrategy)
        bits = b"".join(p.detach().numpy().tobytes() for p in pl_module.parameters())
        stats = strategy.comm_stats()
        report = {
            "parameters": hashlib.sha256(bits).hexdigest(),
            "compression": repr(strategy.compression),
            "explain": strategy.explain(),
            "hook_calls": stats.hook_calls,
            "as_promised": stats.promised.total == stats.sent_bytes > 0,
            "world": stats.world_size,
        }
        (self.folder / f"{self.launch}.{trainer.global_rank}.json").write_text(json.dumps(report))


class Tiny(pl.LightningModule):
    """One compressed matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 48)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layer(batch).square().mean()
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def main(folder: Path, launch: str) -> None:
    """Fit once."""
    strategy, devices = LAUNCHES[launch]
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Report(folder, launch)],
    )
    trainer.fit(Tiny(), DataLoader(torch.randn(32, 64), batch_size=4))  # type: ignore[arg-type]  # a tensor is a dataset


if __name__ == "__main__":
    torch.set_num_threads(1)
    for argument in sys.argv[2:]:
        main(Path(sys.argv[1]), argument)
