"""Stands beside a script of the documentation: a model that writes down what its rank saw of each fit."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

SAMPLES, BATCH, EPOCHS = 32, 4, 2
FOLDER = Path(os.environ.get("COMMOPT_TEST_FOLDER", "."))


class Model(L.LightningModule):
    """One compressed matrix."""

    def __init__(self) -> None:
        super().__init__()
        L.seed_everything(1, verbose=False)
        torch.set_num_threads(1)
        self.layer = nn.Linear(64, 48)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layer(batch).square().mean()
        self.log("loss", loss.detach())
        return loss

    @override
    def on_train_end(self) -> None:
        strategy: Any = self.trainer.strategy
        bits = b"".join(p.detach().numpy().tobytes() for p in self.parameters())
        stats = strategy.comm_stats()
        report = {
            "launcher": type(strategy.cluster_environment).__name__,
            "parameters": hashlib.sha256(bits).hexdigest(),
            "explain": strategy.explain(),
            "some": self.layer.bias.tolist(),
            "steps": self.global_step,
            "hook_calls": stats.hook_calls,
            "sent": stats.sent_bytes,
            "promised": stats.promised.total,
            "world": stats.world_size,
            "node_ranks": _ranks_of_node(),
        }
        fit = len(list(FOLDER.glob(f"fit*.rank{self.global_rank}.json")))
        (FOLDER / f"fit{fit}.rank{self.global_rank}.json").write_text(json.dumps(report))

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def _ranks_of_node() -> int | None:
    """Ranks on this node as MPI counts them, under MPI."""
    if "PMI_RANK" not in os.environ:
        return None
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED).Get_size())


def data() -> "DataLoader[Any]":
    """The same samples on all ranks, which Lightning's sampler divides."""
    samples: Any = torch.randn(SAMPLES, 64, generator=torch.Generator().manual_seed(1))
    return DataLoader(samples, batch_size=BATCH)
