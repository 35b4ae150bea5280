"""A sharded run resumes as if it had never stopped; one file of it is an ordinary checkpoint."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_commopt import Int4, Int8, PowerSGD
from lightning_commopt.strategies import residual_checkpoint
from tests.pool import WorkerPool, trainer
from tests.strategies.sharded_toy import fit_sharded, sharded, whole
from tests.strategies.toy import Regression, batches, loader, same_bits, state_of, tensors_of

pytestmark = pytest.mark.runs("commopt_hsdp", "checkpoints and resume")

NODES: dict[str, Any] = {"nodes": 2, "timeout": 60.0}
STEPS = 4
"""Steps of an epoch."""


class SaveAfterFirstEpoch(pl.Callback):
    """Saves where the first epoch ends.

    Args:
        path: Of the checkpoint.
        files: Whether residuals go into a file a rank.
    """

    def __init__(self, path: Path, files: bool) -> None:
        self.path, self.files = path, files
        self.state: dict[str, Any] = {}

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 0:
            limit = residual_checkpoint._INLINE_BYTES
            residual_checkpoint._INLINE_BYTES = -1 if self.files else limit
            trainer.save_checkpoint(self.path)
            residual_checkpoint._INLINE_BYTES = limit
            self.state = state_of(trainer.strategy)


class StateAtStart(pl.Callback):
    """Keeps the exchange's state as training begins."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.state = state_of(trainer.strategy)


def stop_and_go(path: Path, method: Any, resumed_method: Any, shards: bool, files: bool) -> tuple[Any, ...]:
    """Two epochs at once; and the second one alone, in another model."""
    options: dict[str, Any] = {"save_distributed_checkpoint": shards}
    save, start = SaveAfterFirstEpoch(path, files), StateAtStart()
    data = batches(STEPS)
    through = fit_sharded(sharded(method, **options), Regression(), data, max_epochs=2, callbacks=[save])
    strategy = sharded(resumed_method, **options)
    resumed = fit_sharded(strategy, Regression(seed=1), data, path, max_epochs=2, callbacks=[start])
    return through, resumed, save.state, start.state


@pytest.mark.parametrize(
    ("method", "shards", "files"),
    [
        ("none", True, False),
        ("none", False, False),
        ("int8", True, False),
        ("int8", True, True),
        ("int8", False, True),
        (PowerSGD(rank=2), False, False),
    ],
)
def test_resumed_is_never_stopped(pool: WorkerPool, tmp_path: Path, method: Any, shards: bool, files: bool) -> None:
    ranks = pool.run(stop_and_go, 4, tmp_path / "a.ckpt", method, method, shards, files, **NODES)
    assert (tmp_path / "a.ckpt").is_dir() == shards
    for through, resumed, saved, loaded in ranks:
        assert resumed.steps == through.steps == 2 * STEPS
        assert torch.equal(resumed.parameters, through.parameters)
        assert same_bits(saved, loaded)
        assert (method == "none") == (not tensors_of(saved))
    if method == "int8":
        assert not same_bits(ranks[0][2]["first"], ranks[2][2]["first"]), "each rank has residuals of its own"


def mean_residual(states: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The mean over replicas of the residual of each parameter, by its element."""
    total: dict[str, Tensor] = {}
    for state in states:
        for name, pieces in state["first"].items():
            for first, values in pieces:
                total.setdefault(name, torch.zeros(10_000))[first : first + len(values)] += values / 2
    return total


def test_another_method_keeps_the_mean_residual(pool: WorkerPool, tmp_path: Path) -> None:
    ranks = pool.run(stop_and_go, 4, tmp_path / "a.ckpt", Int8(), Int4(), False, False, **NODES)
    before, after = (mean_residual([rank[i] for rank in ranks]) for i in (2, 3))
    assert set(before) == {"layers.0.weight", "layers.3.weight", "layers.5.weight"}
    for name, residual in before.items():
        assert residual.abs().max() > 0
        torch.testing.assert_close(after[name], residual, rtol=1e-5, atol=1e-8)


def in_one_process(path: Path) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Resume an ordinary Trainer from the file, for no further epoch and for one."""
    fitted = []
    for epochs in (1, 2):
        model = Regression(seed=1)
        fitter = trainer(1, "auto", max_epochs=epochs, use_distributed_sampler=False)
        fitter.fit(model, loader(batches(STEPS)), ckpt_path=path, weights_only=False)
        fitted.append(whole(model))
    states: Any = fitter.optimizers[0].state_dict()["state"]
    return fitted[0], fitted[1], [states[i]["step"] for i in states]


def test_one_file_is_an_ordinary_checkpoint(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    through = pool.run(first_epoch, 4, path, **NODES)[0]
    loaded, trained, steps = pool.run(in_one_process, 1, path)[0]
    assert torch.equal(loaded, through)
    assert not torch.equal(trained, through)
    assert all(int(step) == 2 * STEPS for step in steps), "the optimizer state was loaded, too"


def first_epoch(path: Path) -> Tensor:
    save = SaveAfterFirstEpoch(path, False)
    strategy = sharded("int8", save_distributed_checkpoint=False)
    return fit_sharded(strategy, Regression(), batches(STEPS), callbacks=[save]).parameters
