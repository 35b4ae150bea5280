"""Between replicas of a stage, gradients travel by every kind of method; runs resume exactly."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt import CommOptPipelineStrategy, Compression, Uncompressed
from tests.methods import Case, named_case
from tests.pipeline.toy import TinyGPT, alone, distance, tokens
from tests.pool import WorkerPool, trainer
from tests.strategies.toy import loader, same_bits

pytestmark = pytest.mark.runs("commopt_pipeline", "with data parallel")

Fitted = tuple[dict[str, Tensor], int]
"""Weights, and the rounds of exchange."""
METHODS = [named_case(id) for id in ("none", "fp16", "int8", "powersgd-rank=2")]
"""One of each kind of state: none, a scale, residuals, factors. The exchange is that of data parallelism."""
model = partial(TinyGPT, optimizer="sgd")


def strategy_of(method: Compression, **options: Any) -> CommOptPipelineStrategy:
    """Two stages, active from the first step."""
    active: dict[str, Any] = {} if isinstance(method, Uncompressed) else {"start_step": 0}
    return CommOptPipelineStrategy(2, 2, compression=method, **active, **options)


def trained(method: Compression, data: list[Tensor], save: Path | None = None, resume: Path | None = None) -> Fitted:
    """Fit; save a checkpoint or resume from one where a file is given."""
    strategy = strategy_of(method)
    own = trainer(4, strategy, max_epochs=2 if resume else 1, use_distributed_sampler=False)
    module = model()
    own.fit(module, loader(data), ckpt_path=resume)
    if save:
        own.save_checkpoint(save)
    return dict(module.state_dict()), strategy.comm_stats().rounds


def whole_and_resumed(method: Compression, path: Path) -> tuple[Fitted, Fitted]:
    """A fit in one piece, and in two with a checkpoint between them."""
    data = tokens(4, replica=dist.get_rank() // 2)
    whole = trained(method, data)
    trained(method, data[:2], save=path)
    return whole, trained(method, data[2:], resume=path)


@pytest.mark.parametrize("case", METHODS, ids=lambda case: case.id)
def test_methods_and_resume(pool: WorkerPool, case: Case, tmp_path: Path) -> None:
    method = replace(case.method, exact_below=16)  # all matrices of this model are small
    outcomes = pool.run(whole_and_resumed, 4, method, tmp_path / "a.ckpt")
    expected = alone(model(), [tokens(4, replica=r) for r in range(2)])
    tolerance = {"A": 5e-3, "B": 0.1, "C": 2.0}[case.method.loss_safety]
    first = outcomes[0][0][0]
    for (state, rounds), (resumed, _) in outcomes:
        assert rounds == 4
        assert same_bits(state, first)
        assert same_bits(resumed, first)
        assert distance(state, expected) < (1e-6 if isinstance(case.method, Uncompressed) else tolerance)


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
