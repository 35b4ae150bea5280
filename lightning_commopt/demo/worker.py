"""One rank of ``commopt demo``: trains for some steps; rank 0 writes what that came to."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch

from lightning_commopt.callbacks import CommMonitor
from lightning_commopt.demo.byte_gpt import LitByteGPT, loaders, quiet

__all__ = ["Training", "train"]


@dataclass(frozen=True)
class Training:
    """What a rank is to do.

    Args:
        strategy: Lightning's name for it.
        nodes: Number of nodes, of ``devices`` ranks each.
        devices: Ranks of a node.
        steps: Optimizer steps.
        batch_size: Windows of 128 bytes a rank and step.
        out: Where rank 0 writes the run.

    """

    strategy: str
    nodes: int
    devices: int
    steps: int
    batch_size: int
    out: str


def train(training: Training) -> None:
    """Train the small byte-level GPT on the CPU, and validate once."""
    quiet()
    torch.set_num_threads(1)
    L.seed_everything(1, verbose=False)
    batches, val = loaders(training.batch_size, val_windows=64)
    trainer = L.Trainer(
        strategy=training.strategy,
        accelerator="cpu",
        num_nodes=training.nodes,
        devices=training.devices,
        max_steps=training.steps,
        val_check_interval=training.steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[CommMonitor(table=False, report=Path(training.out))],
        log_every_n_steps=10,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(LitByteGPT(), train_dataloaders=batches, val_dataloaders=val)


if __name__ == "__main__":
    train(Training(**json.loads(sys.argv[1])))
