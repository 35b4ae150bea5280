"""Between replicas of a stage, gradients travel by every method; runs resume exactly."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt import CommOptPipelineStrategy, Compression, Uncompressed
from tests.methods import CASES, Case
from tests.pipeline.toy import TinyGPT, alone, distance, tokens
from tests.pool import WorkerPool, trainer
from tests.strategies.toy import loader, same_bits

METHODS = [case for case in CASES if not case.hierarchy]
model = partial(TinyGPT, optimizer="sgd")


def strategy_of(method: Compression, **options: Any) -> CommOptPipelineStrategy:
    """Two stages, active from the first step."""
    active = {} if isinstance(method, Uncompressed) else {"start_step": 0}
    return CommOptPipelineStrategy(2, 2, compression=method, **active, **options)


def trained(method: Compression, folder: Path | None, count: int, resume: bool) -> tuple[dict[str, Tensor], int]:
    """Weights after ``count`` batches, and the rounds of exchange; saves or resumes where a folder is given."""
    strategy = strategy_of(method)
    own = trainer(dist.get_world_size(), strategy, max_epochs=2 if resume else 1, use_distributed_sampler=False)
    module = model()
    data = tokens(6, replica=dist.get_rank() // 2)
    part = data[count:] if resume else data[:count]
    own.fit(module, loader(part), ckpt_path=folder / "a.ckpt" if folder is not None and resume else None)
    if folder is not None and not resume:
        own.save_checkpoint(folder / "a.ckpt")
    return dict(module.state_dict()), strategy.comm_stats().rounds


@pytest.mark.parametrize("case", METHODS, ids=lambda case: case.id)
def test_methods_and_resume(pool: WorkerPool, case: Case, tmp_path: Path) -> None:
    whole = pool.run(trained, 4, case.method, None, 6, False)
    expected = alone(model(), [tokens(6, replica=r) for r in range(2)])
    tolerance = {"A": 5e-3, "B": 0.1, "C": 2.0}[case.method.loss_safety]
    for state, rounds in whole:
        assert rounds == 6
        assert same_bits(state, whole[0][0])
        assert distance(state, expected) < (1e-6 if isinstance(case.method, Uncompressed) else tolerance)
    pool.run(trained, 4, case.method, tmp_path, 3, False)
    for state, _ in pool.run(trained, 4, case.method, tmp_path, 3, True):
        assert same_bits(state, whole[0][0])


def spoilt(nonfinite: Any) -> dict[str, Tensor]:
    """The gradient of one replica is infinite on the last stage alone, in one batch."""

    class Spoilt(TinyGPT):
        def on_after_backward(self) -> None:
            pass

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            infinite = batch_idx == 1 and dist.get_rank() >= 2
            return loss + self.norm.weight.sum() * float("inf") if infinite else loss

    own = trainer(4, CommOptPipelineStrategy(2, 2, compression="int8", start_step=0, nonfinite=nonfinite), max_epochs=1)
    module = Spoilt(optimizer="sgd")
    own.fit(module, loader(tokens(3, replica=dist.get_rank() // 2)))
    return dict(module.state_dict())


def test_nonfinite_gradients(pool: WorkerPool) -> None:
    for state in pool.run(spoilt, 4, "skip"):
        assert all(torch.isfinite(t).all() for t in state.values())
    with pytest.raises(Exception, match="The gradient of `.*` is not finite on rank"):
        pool.run(spoilt, 4, "error", timeout=40)
