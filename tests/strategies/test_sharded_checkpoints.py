"""A sharded run resumes as if it had never stopped; one file of it is an ordinary checkpoint."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_commopt import Int4, Int8, PowerSGD, TopK
from lightning_commopt.strategies import residual_checkpoint
from tests.pool import WorkerPool, trainer
from tests.strategies.sharded_toy import Idle, fit_sharded, sharded, whole
from tests.strategies.toy import Batch, Regression, batches, distance, loader, same_bits, state_of, tensors_of

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


INSIDE = {"shard_gather": Int8(stochastic=True), "shard_scatter": Int8(stochastic=True)}


def stop_and_go(
    path: Path,
    shards: bool,
    files: bool,
    options: dict[str, Any],
    resumed_options: dict[str, Any],
    model: type[Regression] = Regression,
) -> tuple[Any, ...]:
    """Two epochs at once; and the second one alone, in another model."""
    save, start = SaveAfterFirstEpoch(path, files), StateAtStart()
    data = batches(STEPS)
    strategy = sharded(save_distributed_checkpoint=shards, **options)
    through = fit_sharded(strategy, model(), data, max_epochs=2, callbacks=[save])
    strategy = sharded(save_distributed_checkpoint=shards, **resumed_options)
    resumed = fit_sharded(strategy, model(seed=1), data, path, max_epochs=2, callbacks=[start])
    return through, resumed, save.state, start.state


@pytest.mark.parametrize(
    ("method", "shards", "files", "inside"),
    [
        ("none", True, False, {}),
        ("none", False, False, {}),
        ("int8", True, False, INSIDE),
        ("int8", True, True, {}),
        ("int8", False, True, INSIDE),
        (PowerSGD(rank=2), False, False, {}),
    ],
)
def test_resumed_is_never_stopped(
    pool: WorkerPool, tmp_path: Path, method: Any, shards: bool, files: bool, inside: dict[str, Any]
) -> None:
    options = {"method": method, **inside}
    ranks = pool.run(stop_and_go, 4, tmp_path / "a.ckpt", shards, files, options, options, **NODES)
    assert (tmp_path / "a.ckpt").is_dir() == shards
    for through, resumed, saved, loaded in ranks:
        assert resumed.steps == through.steps == 2 * STEPS
        assert torch.equal(resumed.parameters, through.parameters)
        assert same_bits(saved, loaded)
        assert (method == "none") == (not tensors_of(saved))
    if method == "int8":
        for kind in ["first"] + ["scatter"] * bool(inside):
            assert not same_bits(ranks[0][2][kind], ranks[2][2][kind]), "each rank has residuals of its own"


class Later(Idle):
    """The layer that is never used is used after the first epoch; AdamW counts its steps from there."""

    @override
    def loss(self, batch: Batch) -> Tensor:
        loss = super().loss(batch)
        return loss + self.never(batch[0].repeat(1, 2)[:, :50]).square().mean() if self.current_epoch else loss


class LaterWithMomentum(Later):
    """The same with momentum and dampening, which a first step does without."""

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9, dampening=0.5, weight_decay=0.1)


@pytest.mark.parametrize(
    ("model", "method", "shards"),
    [
        (Idle, "none", True),
        (Later, "none", False),
        (LaterWithMomentum, "none", True),
        (Later, "int8", True),
        (Idle, TopK(density=0.1), False),
    ],
)
def test_unused_parameters_resume_as_well(
    pool: WorkerPool, tmp_path: Path, model: type[Idle], method: Any, shards: bool
) -> None:
    options = {"method": method}
    path = tmp_path / "a.ckpt"
    for through, resumed, *_ in pool.run(stop_and_go, 4, path, shards, False, options, options, model, **NODES):
        assert resumed.steps == through.steps == 2 * STEPS
        assert torch.equal(resumed.parameters, through.parameters)


def mean_residual(states: list[dict[str, Any]]) -> dict[str, Tensor]:
    """What residuals will still add to the mean gradient of each parameter, by its element."""
    total: dict[str, Tensor] = {}
    for state in states:
        for kind, senders in (("first", 2), ("scatter", 4)):
            for name, pieces in state.get(kind, {}).items():
                for first, values in pieces:
                    total.setdefault(name, torch.zeros(10_000))[first : first + len(values)] += values / senders
    return total


OTHERWISE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"method": Int8()}, {"method": Int4()}),
    ({"method": "int8", "shard_scatter": "int8"}, {"method": "int8"}),
    ({"method": "none", "shard_scatter": "int8", "residuals": "mean"}, {"method": "none", "shard_scatter": "int4"}),
    ({"method": "int8", "shard_scatter": "int8", "residuals": "mean"},) * 2,
]


@pytest.mark.parametrize(("before", "after"), OTHERWISE)
def test_what_residuals_mean_is_kept(
    pool: WorkerPool, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    ranks = pool.run(stop_and_go, 4, tmp_path / "a.ckpt", False, False, before, after, **NODES)
    saved, loaded = (mean_residual([rank[i] for rank in ranks]) for i in (2, 3))
    assert set(saved) == {"layers.0.weight", "layers.3.weight", "layers.5.weight"}
    for name, residual in saved.items():
        assert residual.abs().max() > 0
        torch.testing.assert_close(loaded[name], residual, rtol=1e-5, atol=1e-8)
    for through, resumed, *_ in ranks:
        assert torch.equal(resumed.parameters, ranks[0][1].parameters)
        assert not torch.equal(resumed.parameters, through.parameters)


def in_one_process(path: Path, kind: type[Regression]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Resume an ordinary Trainer from the file, for no further epoch and for one."""
    fitted = []
    for epochs in (1, 2):
        model = kind(seed=1)
        fitter = trainer(1, "auto", max_epochs=epochs, use_distributed_sampler=False)
        fitter.fit(model, loader(batches(STEPS)), ckpt_path=path, weights_only=False)
        fitted.append(whole(model))
    states: Any = fitter.optimizers[0].state_dict()["state"]
    return fitted[0], fitted[1], [states[i]["step"] for i in states]


@pytest.mark.parametrize("kind", [Regression, Idle])
def test_one_file_is_an_ordinary_checkpoint(pool: WorkerPool, tmp_path: Path, kind: type[Regression]) -> None:
    path = tmp_path / "a.ckpt"
    through = pool.run(first_epoch, 4, path, kind, **NODES)[0]
    loaded, trained, steps = pool.run(in_one_process, 1, path, kind)[0]
    assert torch.equal(loaded, through)
    assert not torch.equal(trained, through)
    assert {int(step) for step in steps} == ({2 * STEPS} if kind is Regression else {0, STEPS, 2 * STEPS}), (
        "the optimizer state was loaded, too"
    )


def first_epoch(path: Path, kind: type[Regression]) -> Tensor:
    save = SaveAfterFirstEpoch(path, False)
    strategy = sharded("int8", save_distributed_checkpoint=False)
    return fit_sharded(strategy, kind(), batches(STEPS), callbacks=[save]).parameters


class Shuffled(Idle):
    """Its optimizer has other groups, and in another order, than the module has parameters."""

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        vectors, matrices = (
            [p for p in reversed(list(self.parameters())) if (p.ndim > 1) == matrix] for matrix in (False, True)
        )
        groups: list[dict[str, Any]] = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices}]
        return torch.optim.AdamW(groups, 3e-3)


class Stateless(Idle):
    """Its optimizer keeps nothing but its learning rate."""

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, STEPS, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def first_epoch_of_two(path: Path, kind: type[Regression], strategy: Any) -> Tensor:
    save = SaveAfterFirstEpoch(path, False)
    if not isinstance(strategy, str):
        strategy = sharded("none", **strategy)
    return fit_sharded(strategy, kind(), batches(STEPS), max_epochs=2, callbacks=[save]).parameters


def second_epoch_alone(path: Path, kind: type[Regression]) -> Tensor:
    """In one process, on the batches of four."""
    of_ranks = zip(*(batches(STEPS, rank=rank) for rank in range(4)), strict=True)
    data = [tuple(torch.cat(parts) for parts in zip(*same, strict=True)) for same in of_ranks]
    model = kind(seed=1)
    fitter = trainer(1, "auto", max_epochs=2, use_distributed_sampler=False)
    fitter.fit(model, loader(data), ckpt_path=path, weights_only=False)
    return whole(model)


def second_epoch_sharded(path: Path, kind: type[Regression]) -> Tensor:
    strategy = sharded("none", save_distributed_checkpoint=False)
    return fit_sharded(strategy, kind(seed=1), batches(STEPS), path, max_epochs=2).parameters


@pytest.mark.parametrize("kind", [Shuffled, Stateless])
@pytest.mark.parametrize("wrote", [{"save_distributed_checkpoint": False}, "ddp_find_unused_parameters_true"], ids=str)
def test_a_file_goes_on_in_any_number_of_processes(
    pool: WorkerPool, tmp_path: Path, kind: type[Regression], wrote: Any
) -> None:
    path = tmp_path / "a.ckpt"
    through = pool.run(first_epoch_of_two, 4, path, kind, wrote, **NODES)[0]
    alone = pool.run(second_epoch_alone, 1, path, kind)[0]
    resumed = pool.run(second_epoch_sharded, 4, path, kind, **NODES)[0]
    assert distance(alone, through) < 1e-5
    assert distance(resumed, through) < 1e-5
