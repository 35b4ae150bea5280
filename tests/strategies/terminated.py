"""A script that users could have written: `python terminated.py FOLDER`. One of two ranks gets SIGTERM in each fit."""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_commopt import CommOptStrategy
from tests.strategies.launched import Tiny

FITS = (("int8", 1), ("none", 0), ("bf16", 0))
"""Method, and the rank that gets the signal. What rank 0 gets, its launcher sends to rank 1, too."""

STEPS = 16


class Signal(pl.Callback):
    """Sends the signal, and writes down how the fit ended."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        bits = b"".join(p.detach().numpy().tobytes() for p in pl_module.parameters())
        report = {
            "error": type(exception).__name__,
            "steps": trainer.global_step,
            "parameters": hashlib.sha256(bits).hexdigest(),
        }
        self.path.with_suffix(f".{trainer.global_rank}.json").write_text(json.dumps(report))


def main(folder: Path, method: str, rank: int) -> None:
    """Fit until the signal."""
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        strategy=CommOptStrategy(method),
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Signal(folder / method, rank)],
    )
    try:
        trainer.fit(Tiny(), DataLoader(torch.randn(8 * STEPS, 64), batch_size=4))  # type: ignore[arg-type]
    except SystemExit:
        return
    raise AssertionError("the signal did not end the fit")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for method, rank in FITS:
        main(Path(sys.argv[1]), method, rank)
