"""One attempt of the soak's training: `python -m benchmarks.soak_job ATTEMPT.json`; it plants the fault it is told to.

The model and the data are small. Every epoch ends with a checkpoint and with a comparison of all ranks' parameters.
"""

import hashlib
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader

from lightning_commopt import CommOptStrategy
from lightning_commopt.strategies import residual_checkpoint

residual_checkpoint._INLINE_BYTES = 0  # a file a rank, as large models have

DIVERGED = 99
"""Exit code of a rank that sees unequal parameters."""

BATCHES = 12


@dataclass(frozen=True)
class Attempt:
    """What one launch is to do.

    Args:
        folder: Of checkpoints and reports.
        launcher: ``"popen"``, ``"torchrun"``, ``"fork"`` or ``"spawn"``.
        ranks: Processes.
        method: A compression method by word.
        epochs: Epochs at which training is complete.
        fault: Kind, or ``"none"``.
        rank: The rank that suffers it.
        step: Batch of this attempt at which it happens.

    """

    folder: str
    launcher: str
    ranks: int
    method: str
    epochs: int
    fault: str
    rank: int
    step: int


class Net(pl.LightningModule):
    """A regression through three matrices."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__()
        self.attempt = attempt
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(40, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 40))
        self.batches = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        """Return the loss of a batch, or suffer the fault."""
        self.batches += 1
        loss: Tensor = (self.layers(batch) - batch.flip(1)).square().mean()
        attempt = self.attempt
        if self.batches != attempt.step or self.global_rank != attempt.rank:
            return loss
        kind = attempt.fault
        if kind not in ("none", "uneven", "cut"):
            note_fault(attempt)
        if kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        elif kind == "exit":
            os._exit(3)
        elif kind == "raise":
            raise ValueError("planted: a bad sample")
        elif kind == "none_loss":
            return None
        elif kind == "inf":
            return loss * float("inf")
        return loss

    def on_train_epoch_end(self) -> None:
        """Compare all ranks' parameters."""
        bits = b"".join(p.detach().numpy().tobytes() for p in self.parameters())
        everyone: list[Any] = [None] * self.trainer.world_size
        dist.all_gather_object(everyone, hashlib.sha256(bits).hexdigest())
        if len(set(everyone)) > 1 or not all(bool(p.isfinite().all()) for p in self.parameters()):
            print("DIVERGED:", everyone, flush=True)
            os._exit(DIVERGED)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


class UnevenBatches(BatchSampler):
    """One batch fewer on one rank."""

    def __init__(self, attempt: Attempt, rank: int) -> None:
        self.count = BATCHES - (attempt.fault == "uneven" and rank == attempt.rank)
        self.rank = rank

    def __iter__(self) -> Iterator[list[int]]:
        return ([self.rank * 100 + i, self.rank * 100 + i + 1] for i in range(self.count))

    def __len__(self) -> int:
        return self.count


class CutShort(TorchCheckpointIO):
    """Dies while one rank writes its part of a checkpoint: its residuals, or on rank 0 the main file too."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__()
        self.attempt = attempt
        self.saves = 0

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        """Write, or die."""
        rank = int(os.environ.get("LOCAL_RANK", "0")) if not dist.is_initialized() else dist.get_rank()
        self.saves += 1
        if self.attempt.fault == "cut" and rank == self.attempt.rank and self.saves == self.attempt.step:
            note_fault(self.attempt)
            Path(str(path) + ".part").write_bytes(b"cut short")
            os.kill(os.getpid(), signal.SIGKILL)
        super().save_checkpoint(checkpoint, path, storage_options)


def note_fault(attempt: Attempt) -> None:
    """Leave the time of the fault for the harness."""
    (Path(attempt.folder) / "fault").write_text(str(time.time()))


def run(attempt: Attempt) -> None:
    """Train until the attempt's number of epochs, from the last checkpoint."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    in_processes: dict[str, Any] = {"fork": {"start_method": "fork"}, "spawn": {"start_method": "spawn"}}.get(
        attempt.launcher, {}
    )
    compressing: dict[str, Any] = {} if attempt.method == "none" else {"nonfinite": "skip", "start_step": 0}
    trainer = pl.Trainer(
        strategy=CommOptStrategy(attempt.method, uneven="trim", bucket_cap_mb=0.02, **compressing, **in_processes),
        accelerator="cpu",
        devices=attempt.ranks,
        max_epochs=attempt.epochs,
        callbacks=[ModelCheckpoint(attempt.folder, save_last=True, every_n_epochs=1, save_top_k=0)],
        plugins=[CutShort(attempt)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    data = torch.randn(1000, 40, generator=torch.Generator().manual_seed(1))
    last = Path(attempt.folder) / "last.ckpt"
    trainer.fit(Net(attempt), Data(data, attempt), ckpt_path=str(last) if last.exists() else None)
    if trainer.is_global_zero:
        (Path(attempt.folder) / "done").write_text(str(trainer.current_epoch))


class Data(pl.LightningDataModule):
    """Loaders made once ranks are known."""

    def __init__(self, data: Tensor, attempt: Attempt) -> None:
        super().__init__()
        self.data = data
        self.attempt = attempt

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return this rank's batches."""
        assert self.trainer is not None
        sampler = UnevenBatches(self.attempt, self.trainer.global_rank)
        return DataLoader(self.data, batch_sampler=sampler)  # type: ignore[arg-type]


if __name__ == "__main__":
    run(Attempt(**json.loads(Path(sys.argv[1]).read_text())))
