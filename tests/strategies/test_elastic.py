"""torchrun restarts workers after one was killed or stopped, and a fit goes on, also on another number of ranks."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, get_args_parser
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_commopt import Int8
from lightning_commopt.callbacks import LinearLRScaling
from tests.launch.job import free_port
from tests.methods import Case
from tests.pool import PoolEnvironment, WorkerPool, trainer
from tests.strategies import restarted
from tests.strategies.test_resume import assert_conserved, mean_residual
from tests.strategies.toy import Regression, flat, same_bits, state_of, strategy_of

pytestmark = pytest.mark.runs("commopt", "restart by torchrun, other number of ranks")


def uninterrupted(folder: Path) -> str:
    """The same fit with nobody killed."""
    return restarted.train(folder, plugins=[PoolEnvironment()])


@pytest.fixture(scope="module")
def expected(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the parameters of the uninterrupted fit."""
    return pool.run(uninterrupted, 2, tmp_path_factory.mktemp("uninterrupted"))[0]


def torchrun(words: list[str], folder: Path, rank: int, fault: str) -> None:
    """What `torchrun` does with its command line; its workers are forks of this process, which has all imports."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE"):
        del os.environ[name]
    config, _, _ = config_from_args(get_args_parser().parse_args([*words, "--monitor-interval=0.1", "unused.py"]))
    elastic_launch(replace(config, start_method="fork"), restarted.main)(folder, rank, fault)


@pytest.mark.parametrize(("rendezvous", "rank", "fault"), [("static", 0, "SIGKILL"), ("c10d", 1, "SIGSTOP")])
def test_restart_goes_on(
    pool: WorkerPool, tmp_path: Path, expected: str, rendezvous: str, rank: int, fault: str
) -> None:
    where = f"--master-port={free_port()}" if rendezvous == "static" else "--rdzv-endpoint=localhost:0"
    words = [f"--rdzv-backend={rendezvous}", where, "--nproc-per-node=2", "--max-restarts=1"]
    pool.run(torchrun, 1, words, tmp_path, rank, fault, group=False, timeout=90)
    assert "Restored all states from the checkpoint" in pool.output[0]
    digests = {path.name: path.read_text() for path in tmp_path.glob("rank*.attempt*")}
    assert digests == {"rank0.attempt1": expected, "rank1.attempt1": expected}, pool.output[0]


# ---- another number of ranks ----------------------------------------------------------------------------------------

SAMPLES, BATCH, RATE = 48, 4, 1e-3


class Seen(Regression):
    """Notes which samples a rank got, and at which learning rate."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.seen: list[list[int]] = []
        self.rates: set[float] = set()

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets, numbers = batch
        self.seen[-1].extend(numbers.tolist())
        self.rates.update(group["lr"] for group in self.trainer.optimizers[0].param_groups)
        return super().training_step((inputs, targets), batch_idx)

    @override
    def on_train_epoch_start(self) -> None:
        self.seen.append([])

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), RATE)


class SaveAtEnd(pl.Callback):
    """Saves after the first epoch, and keeps the residuals that a fit began with."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start: dict[str, Any] = {}

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.start = state_of(trainer.strategy)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


@dataclass
class Part:
    """What one rank saw of an epoch: samples, learning rates, residuals before and after, parameters."""

    seen: list[int]
    rates: set[float]
    start: dict[str, Any]
    end: dict[str, Any]
    parameters: Tensor


def epoch_of(path: Path, resume: bool) -> Part:
    """The first epoch, or the second one from the checkpoint of the first, with Lightning's own sampler."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, 40, generator=generator)
    data = TensorDataset(inputs, inputs.flip(-1).sin(), torch.arange(SAMPLES))
    strategy, model, save = strategy_of(Case(Int8())), Seen(), SaveAtEnd(path)
    callbacks = [LinearLRScaling(base_batch_size=BATCH, warmup_steps=0), save]
    world = dist.get_world_size()
    fitter = trainer(world, strategy, max_epochs=1 + resume, callbacks=callbacks)
    fitter.fit(model, DataLoader(data, batch_size=BATCH), ckpt_path=path if resume else None)
    return Part(model.seen[-1], model.rates, save.start, state_of(strategy), flat(model))


@pytest.mark.parametrize("world", [2, 4])
def test_resume_of_three_ranks_on_others(pool: WorkerPool, tmp_path: Path, world: int) -> None:
    old = pool.run(epoch_of, 3, tmp_path / "three.ckpt", False)
    new = pool.run(epoch_of, world, tmp_path / "three.ckpt", True)
    for ranks in (old, new):
        samples = [number for part in ranks for number in part.seen]
        assert sorted(samples) == list(range(SAMPLES))
        assert [sorted(part.rates) for part in ranks] == [[pytest.approx(RATE * len(ranks))]] * len(ranks)
        assert all(torch.equal(part.parameters, ranks[0].parameters) for part in ranks)
    assert [len(part.seen) for part in new] == [SAMPLES // world] * world
    assert new[0].seen != sorted(new[0].seen)  # each epoch is shuffled
    assert_conserved(mean_residual([part.end for part in old]), mean_residual([part.start for part in new]))
    for part in new:  # neither a multiple nor a divisor of three: everybody begins with the mean
        assert same_bits(part.start["first"], new[0].start["first"])
