"""What one rank of a pipeline holds, against one process that trains the whole model."""

import contextlib
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_commopt import CommOptPipelineStrategy
from tests.pool import trainer

__all__ = ["BLOCKS", "WIDTH", "Held", "train"]

BLOCKS, WIDTH, ROWS = 8, 512, 2048


@dataclass(frozen=True)
class Held:
    """Memory of one process, in MB.

    Args:
        tensors: Parameters, gradients and optimizer state after a step, counted.
        peak: By how much its resident set grew at most, from before the model was made to the end of training.

    """

    tensors: float
    peak: float


class _Model(pl.LightningModule):
    """A chain of equal two-layer blocks, 16.8 M parameters in all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*map(_block, range(BLOCKS)))
        self.held = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self.blocks(batch), batch)

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        own = [p for group in optimizer.param_groups for p in group["params"]]
        kept = [*own, *(p.grad for p in own), *(t for state in optimizer.state.values() for t in state.values())]
        self.held = max(self.held, sum(t.nbytes for t in kept if isinstance(t, Tensor)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def _block(_: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def train(ranks: int, microbatches: int, schedule: str) -> Held:
    """Train for three steps; on one rank, without a pipeline and with as many accumulated batches.

    Linux only: the peak is the kernel's own.
    """
    torch.set_num_threads(1)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = _resident("VmRSS")
    model = _Model()
    accumulated = microbatches if ranks == 1 else 1
    strategy = "auto" if ranks == 1 else CommOptPipelineStrategy(ranks, microbatches, schedule)  # type: ignore[arg-type]
    with _quiet():
        trainer(ranks, strategy, max_steps=3, accumulate_grad_batches=accumulated).fit(
            model,
            DataLoader(torch.randn(3 * ROWS, WIDTH), batch_size=ROWS // accumulated),  # type: ignore[arg-type]
        )
    return Held(model.held / 1e6, _resident("VmHWM") - before)


def _resident(entry: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(entry))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
