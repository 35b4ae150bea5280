"""One rank of a run under Lightning: one strategy, Lightning's own loop."""

import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from benchmarks.links.modes import CAP_MB
from benchmarks.links.rank import Task, begin, digest, leave, machine, sent_bytes
from benchmarks.links.record import Run, Series
from benchmarks.links.workload import LEARNING_RATE, batch, initial_model, loss_of
from lightning_commopt import CommOptStrategy
from lightning_commopt.compression import METHODS

__all__ = ["STRATEGIES"]


def _ours(method: str) -> Callable[[], Strategy]:
    return lambda: CommOptStrategy(method, start_step=None if method == "none" else 0, bucket_cap_mb=CAP_MB)


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": DDPStrategy,
    "ddp_cap1": lambda: DDPStrategy(bucket_cap_mb=CAP_MB),
    **{method: _ours(method) for method in METHODS},
    "auto": CommOptStrategy,
}
"""Every strategy by the word of the mode that it stands for."""


class Batches(IterableDataset[tuple[Tensor, Tensor]]):
    """The workload's batches of one rank.

    Args:
        steps: How many.
        rank: Whose.

    """

    def __init__(self, steps: int, rank: int) -> None:
        self.steps, self.rank = steps, rank

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (batch(step, self.rank) for step in range(self.steps))


class LitGPT(L.LightningModule):
    """The workload's model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = initial_model()

    @override
    def training_step(self, words: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = words
        return loss_of(self.model(tokens), targets)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), LEARNING_RATE)


class StepTimes(L.Callback):
    """Measures from the end of a step to the end of the next.

    Args:
        warm_up: Steps that are left out.

    """

    def __init__(self, warm_up: int) -> None:
        self.warm_up, self.series = warm_up, Series()
        self._last, self._sent = 0.0, 0

    @override
    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now, sent = time.perf_counter(), sent_bytes()
        if batch_idx >= self.warm_up:
            self.series.step_ms.append((now - self._last) * 1e3)
            self.series.tx_bytes.append(sent - self._sent)
            self.series.losses.append(float(outputs["loss"]))
        self._last, self._sent = now, sent


def fit(task: Task, mode: str) -> tuple[Series, str, int]:
    """Train; return what this rank measured, the hash of its parameters, and their number."""
    times, model = StepTimes(task.warm_up), LitGPT()
    strategy = STRATEGIES[mode]()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        num_nodes=task.ranks,
        max_epochs=1,
        callbacks=[times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rank = trainer.global_rank
    trainer.fit(model, DataLoader(Batches(task.warm_up + task.steps, rank), batch_size=None))
    if isinstance(strategy, CommOptStrategy) and rank == 0:
        print(strategy.explain(), file=sys.stderr, flush=True)
    if isinstance(strategy, CommOptStrategy) and mode not in ("none", "auto"):
        stats = strategy.comm_stats()
        times.series.promised_bytes = stats.promised.total / stats.rounds
        phases = {"encode": stats.encode_ms, "decode": stats.decode_ms, "collective": stats.collective_ms}
        times.series.spans_ms = {phase: ms / stats.rounds for phase, ms in phases.items()}
    return times.series, digest(model), sum(p.numel() for p in model.parameters())


def main() -> None:
    """Measure one mode, and write the run on rank 0."""
    task = begin()
    warnings.filterwarnings("ignore")  # of Lightning, on data loaders
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    (mode,) = task.modes
    series, hashed, numel = fit(task, mode)
    everyone: list[tuple[Series, str] | None] = [None] * task.ranks
    dist.all_gather_object(everyone, (series, hashed))
    all_ranks = [one for one in everyone if one is not None]
    series.step_ms = [max(steps) for steps in zip(*(one.step_ms for one, _ in all_ranks), strict=True)]
    series.replicas_equal = len({other for _, other in all_ranks}) == 1
    if dist.get_rank() == 0:
        run = Run(task.ranks, task.rate, task.warm_up, True, numel, machine=machine(), series={mode: series})
        run.write(task.out_path)
    leave()


if __name__ == "__main__":
    main()
