"""Files of checkpoints: rank files come and go with the main file, and whatever happens to them the run goes on."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from fsspec import register_implementation
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from typing_extensions import override

from lightning_commopt import CommOptStrategy, Int8
from lightning_commopt.strategies import residual_checkpoint
from tests.methods import Case
from tests.pool import WorkerPool, trainer
from tests.strategies.toy import Fit, Regression, batches, fit, flat, loader, state_of, strategy_of

pytestmark = pytest.mark.runs("commopt", "checkpoints and resume")

INT8, STEPS = Case(Int8()), 4
RANK_FILES = "*.commopt-*-rank*.pt"


def use_rank_files() -> None:
    """As if the residuals were large."""
    residual_checkpoint._INLINE_BYTES = -1


class Scored(Regression):
    """Logs a number that falls for three epochs and then rises, the same on all ranks."""

    @override
    def on_train_epoch_end(self) -> None:
        self.log("score", float(abs(self.current_epoch - 2)), sync_dist=True)


def fit_keeping(folder: Path, epochs: int, options: dict[str, Any], ckpt: str | None = None, **more: Any) -> Fit:
    """Fit with rank files and a ModelCheckpoint."""
    use_rank_files()
    keep = ModelCheckpoint(folder, filename="{epoch}", **options)
    path = None if ckpt is None else folder / ckpt
    model = Scored()
    return fit(
        strategy_of(INT8),
        model,
        batches(STEPS),
        path,
        max_epochs=epochs,
        callbacks=[keep],
        enable_checkpointing=True,
        **more,
    )


def names(folder: Path) -> dict[str, int]:
    """Main files, each with the number of its rank files; `""` for those of none."""
    main = {path.name: 0 for path in folder.iterdir() if path.suffix == ".ckpt"}
    for path in folder.glob(RANK_FILES):
        owner = path.name.split(".commopt-")[0]
        main[owner if owner in main else ""] = main.get(owner, 0) + 1
    return main


def listed(folder: Path, name: str) -> list[str]:
    """Rank files that a main file names."""
    return list(torch.load(folder / name, weights_only=True)[residual_checkpoint.KEY]["files"])


# ---- come and go ----------------------------------------------------------------------------------------------------


def test_rank_files_go_with_their_checkpoint(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(fit_keeping, 2, tmp_path, 5, {"monitor": "score", "save_top_k": 2})
    assert names(tmp_path) == {"epoch=1.ckpt": 2, "epoch=2.ckpt": 2}
    for name in ("epoch=1.ckpt", "epoch=2.ckpt"):
        assert all((tmp_path / file).exists() for file in listed(tmp_path, name))


@pytest.mark.parametrize("save_last", [True, "link"])
def test_last_checkpoint_is_found_and_exact(pool: WorkerPool, tmp_path: Path, save_last: Any) -> None:
    options = {"save_last": save_last, "save_top_k": 1, "monitor": None}
    whole = pool.run(fit_keeping, 2, tmp_path / "whole", 4, options)
    pool.run(fit_keeping, 2, tmp_path / "two", 3, options)
    assert os.path.islink(tmp_path / "two" / "last.ckpt") == (save_last == "link")
    resumed = pool.run(fit_keeping, 2, tmp_path / "two", 4, options, "last.ckpt")
    for ran, reference in zip(resumed, whole, strict=True):
        assert torch.equal(ran.parameters, reference.parameters)
        assert not [text for text in ran.warnings if "residual" in text]


def test_only_the_last_two_saves_of_a_path_are_kept(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(save_repeatedly, 2, tmp_path / "same.ckpt")
    assert names(tmp_path) == {"same.ckpt": 4}
    assert all((tmp_path / file).exists() for file in listed(tmp_path, "same.ckpt"))


class SaveEveryEpoch(pl.Callback):
    """Saves to one path again and again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def save_repeatedly(path: Path) -> None:
    """Four saves."""
    use_rank_files()
    fit(strategy_of(INT8), Regression(), batches(STEPS), max_epochs=4, callbacks=[SaveEveryEpoch(path)])


def test_folder_names_with_brackets(pool: WorkerPool, tmp_path: Path) -> None:
    folder = tmp_path / "sizes=[1, 2]*"
    other = tmp_path / "sizes=1x"  # what the brackets and the star would match as a pattern
    pool.run(fit_keeping, 2, other, 1, {"save_top_k": 1})
    pool.run(fit_keeping, 2, folder, 5, {"monitor": "score", "save_top_k": 1})
    assert names(folder) == {"epoch=2.ckpt": 2}
    assert names(other) == {"epoch=0.ckpt": 2}


def test_weights_only_has_no_entry(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(fit_keeping, 2, tmp_path, 1, {"save_weights_only": True})
    assert names(tmp_path) == {"epoch=0.ckpt": 0}
    assert residual_checkpoint.KEY not in torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)


def test_async_checkpoints(pool: WorkerPool, tmp_path: Path) -> None:
    whole = pool.run(fit_async, 2, tmp_path / "whole", 4, None)
    pool.run(fit_async, 2, tmp_path / "two", 2, None)
    for ran, reference in zip(pool.run(fit_async, 2, tmp_path / "two", 4, "last.ckpt"), whole, strict=True):
        assert torch.equal(ran.parameters, reference.parameters)


def fit_async(folder: Path, epochs: int, ckpt: str | None) -> Fit:
    """With Lightning's asynchronous checkpoints."""
    return fit_keeping(folder, epochs, {"save_last": True}, ckpt, plugins=[AsyncCheckpointIO()])


class Shared(LocalFileSystem):  # type: ignore[misc]  # no annotations
    """Local files under another protocol, as if they were remote."""

    protocol = "shared"

    @classmethod
    @override
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("shared://")))


def fit_shared(folder: str, epochs: int, resume: bool) -> tuple[Tensor, list[str]]:
    """With all checkpoints in a folder that only fsspec knows."""
    register_implementation("shared", Shared)
    use_rank_files()
    keep = ModelCheckpoint(folder, filename="{epoch}", monitor="score", save_top_k=2, save_last=True)
    ckpt = f"{folder}/last.ckpt" if resume else None
    options: dict[str, Any] = {"max_epochs": epochs, "callbacks": [keep], "enable_checkpointing": True}
    ran = fit(strategy_of(INT8), Scored(), batches(STEPS), ckpt, **options)
    return ran.parameters, [text for text in ran.warnings if "esidual" in text]


def test_remote_files(pool: WorkerPool, tmp_path: Path) -> None:
    whole = pool.run(fit_shared, 2, f"shared://{tmp_path}/whole", 5, False)
    assert names(tmp_path / "whole") == {"epoch=1.ckpt": 2, "epoch=2.ckpt": 2, "last.ckpt": 4}
    pool.run(fit_shared, 2, f"shared://{tmp_path}/two", 3, False)
    for (resumed, warnings), (reference, _) in zip(
        pool.run(fit_shared, 2, f"shared://{tmp_path}/two", 5, True), whole, strict=True
    ):
        assert torch.equal(resumed, reference)
        assert not warnings


# ---- accidents ------------------------------------------------------------------------------------------------------


def damage_nothing(file: Path) -> None:
    """For comparison."""


def remove(file: Path) -> None:
    """The file is gone."""
    file.unlink()


def cut(file: Path) -> None:
    """A part is missing."""
    file.write_bytes(file.read_bytes()[:100])


def alter(file: Path) -> None:
    """It loads, but is not what was written."""
    state = torch.load(file, weights_only=True)
    next(iter(state["first"].values()))[0][1].add_(1e-3)
    torch.save(state, file)


@pytest.mark.parametrize("accident", [damage_nothing, remove, cut, alter])
def test_run_goes_on_without_a_rank_file(pool: WorkerPool, tmp_path: Path, accident: Callable[[Path], None]) -> None:
    pool.run(fit_keeping, 2, tmp_path, 1, {"save_top_k": -1})
    accident(tmp_path / listed(tmp_path, "epoch=0.ckpt")[1])
    ranks = pool.run(fit_keeping, 2, tmp_path, 2, {"save_top_k": -1}, "epoch=0.ckpt")
    for rank, ran in enumerate(ranks):
        said = [text for text in ran.warnings if "count as zero" in text]
        assert len(said) == (rank == 0 and accident is not damage_nothing)
        assert all("1 residual file(s)" in text and "rank00001" in text for text in said)
        assert ran.steps == 2 * STEPS
        assert torch.equal(ran.parameters, ranks[0].parameters)


class _Crash(Exception):
    """Planted."""


def crash_between_files(path: Path) -> None:
    """The second save writes rank files, and dies before the main file."""
    use_rank_files()
    saves, write = [0], DDPStrategy.save_checkpoint

    def save(self: DDPStrategy, *args: Any, **kwargs: Any) -> None:
        saves[0] += 1
        if saves[0] == 2:
            raise _Crash
        write(self, *args, **kwargs)

    DDPStrategy.save_checkpoint = save  # type: ignore[method-assign,assignment]
    with pytest.raises(_Crash):
        fit(strategy_of(INT8), Regression(), batches(STEPS), max_epochs=3, callbacks=[SaveEveryEpoch(path)])


def resume_to(path: Path | None, epochs: int) -> Tensor:
    """Parameters after some epochs."""
    return fit(strategy_of(INT8), Regression(), batches(STEPS), path, max_epochs=epochs).parameters


def test_crash_between_rank_files_and_main_file(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(crash_between_files, 2, tmp_path / "last.ckpt")
    assert names(tmp_path) == {"last.ckpt": 4}
    resumed = pool.run(resume_to, 2, tmp_path / "last.ckpt", 3)
    assert all(torch.equal(*pair) for pair in zip(resumed, pool.run(resume_to, 2, None, 3), strict=True))


def test_the_pair_that_was_resumed_from_stays_until_two_newer_ones_exist(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "same.ckpt"
    pool.run(crash_between_files, 2, path)
    loaded = listed(tmp_path, "same.ckpt")
    pool.run(resume_and_save, 2, path, 2)
    assert names(tmp_path) == {"same.ckpt": 6}  # the crashed save and the new one
    assert all((tmp_path / file).exists() for file in loaded)
    pool.run(resume_and_save, 2, path, 4)
    assert names(tmp_path) == {"same.ckpt": 4}
    assert all((tmp_path / file).exists() for file in listed(tmp_path, "same.ckpt"))


def resume_and_save(path: Path, epochs: int) -> None:
    """Go on, saving to the same path after each epoch."""
    use_rank_files()
    fit(strategy_of(INT8), Regression(), batches(STEPS), path, max_epochs=epochs, callbacks=[SaveEveryEpoch(path)])


def test_rank_files_of_no_checkpoint_are_swept(pool: WorkerPool, tmp_path: Path) -> None:
    own, old, young = (f"{name}.ckpt.commopt-0123abcd-rank00000.pt" for name in ("epoch=0", "old", "young"))
    other = "notes.commopt-rank.pt"
    for name in (own, old, young, other):
        (tmp_path / name).touch()
    for name in (old, other):
        os.utime(tmp_path / name, times=(time.time() - 3600,) * 2)
    pool.run(fit_keeping, 2, tmp_path, 1, {})
    left = {path.name for path in tmp_path.iterdir()}
    assert left - set(listed(tmp_path, "epoch=0.ckpt")) == {"epoch=0.ckpt", young, other}


class Failing(Regression):
    """Raises on all ranks in the last batch of the first epoch."""

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.current_epoch == 0 and batch_idx == STEPS - 1:
            raise ZeroDivisionError


class SaveOnOneRank(OnExceptionCheckpoint):
    """As Lightning's, on rank 0 alone: the other ranks may not come."""

    @override
    def on_exception(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.is_global_zero:
            trainer.strategy.save_checkpoint(trainer._checkpoint_connector.dump_checkpoint(), self.ckpt_path)


def fail_and_resume(folder: Path) -> tuple[list[str], int]:
    """An emergency checkpoint, and what is said when it is resumed."""
    with pytest.raises(ZeroDivisionError):
        fit(strategy_of(INT8), Failing(), batches(STEPS), callbacks=[SaveOnOneRank(folder)], enable_checkpointing=True)
    dist.barrier()
    resumed = fit(strategy_of(INT8), Regression(), batches(STEPS), folder / "on_exception.ckpt", max_epochs=2)
    return [text for text in resumed.warnings if "esidual" in text], resumed.steps


def test_emergency_checkpoint_asks_nothing_of_other_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    for rank, (warnings, steps) in enumerate(pool.run(fail_and_resume, 2, tmp_path)):
        assert len(warnings) == (rank == 0)
        assert all("after an exception" in text for text in warnings)
        assert steps >= 2 * STEPS - 1
    assert residual_checkpoint.KEY in torch.load(tmp_path / "on_exception.ckpt", weights_only=True)


# ---- other readers, other moments -----------------------------------------------------------------------------------


def resume_in_plain_lightning(path: Path, weights_only: bool | None) -> tuple[int, Tensor]:
    """One process, no strategy of ours."""
    fitter = trainer(1, "auto", max_epochs=2)
    model = Regression()
    fitter.fit(model, loader(batches(STEPS)), ckpt_path=path, weights_only=weights_only)
    return fitter.global_step, flat(model)


@pytest.mark.parametrize("files", [False, True], ids=["inline", "rank files"])
def test_plain_lightning_resumes(pool: WorkerPool, tmp_path: Path, files: bool) -> None:
    pool.run(fit_keeping if files else fit_inline, 2, tmp_path, 1, {})
    for weights_only in (None, True):
        steps, parameters = pool.run(resume_in_plain_lightning, 1, tmp_path / "epoch=0.ckpt", weights_only)[0]
        assert steps == 2 * STEPS
        assert parameters.isfinite().all()


def fit_inline(folder: Path, epochs: int, options: dict[str, Any]) -> None:
    """Fit with the residuals in the main file."""
    keep = ModelCheckpoint(folder, filename="{epoch}", **options)
    fit(strategy_of(INT8), Scored(), batches(STEPS), max_epochs=epochs, callbacks=[keep], enable_checkpointing=True)


def save_late(folder: Path, look_first: bool) -> dict[str, Any]:
    """Save after the fit, perhaps with a validation in between."""
    strategy = strategy_of(INT8)
    fitter = trainer(dist.get_world_size(), strategy, max_epochs=1, use_distributed_sampler=False)
    model = Regression()
    fitter.fit(model, loader(batches(STEPS)))
    state = state_of(strategy)
    if look_first:
        fitter.validate(model, loader(batches(2)), verbose=False)
    fitter.save_checkpoint(folder / "late.ckpt")
    return state


@pytest.mark.parametrize("look_first", [False, True], ids=["after fit", "after validate"])
def test_save_after_the_fit(pool: WorkerPool, tmp_path: Path, look_first: bool) -> None:
    pool.run(save_late, 2, tmp_path, look_first)
    resumed = pool.run(resume_to, 2, tmp_path / "late.ckpt", 2)
    assert all(torch.equal(*pair) for pair in zip(resumed, pool.run(resume_to, 2, None, 2), strict=True))


def fit_after_test(folder: Path) -> tuple[Tensor, Tensor]:
    """Test one checkpoint, then go on from another one, with one Trainer."""
    strategy = strategy_of(INT8)
    fitter = trainer(dist.get_world_size(), strategy, max_epochs=3, use_distributed_sampler=False)
    fitter.test(Regression(), loader(batches(2)), ckpt_path=folder / "epoch=0.ckpt", verbose=False)
    model = Regression()
    fitter.fit(model, loader(batches(STEPS)), ckpt_path=folder / "epoch=1.ckpt")
    return flat(model), resume_to(folder / "epoch=1.ckpt", 3)


def test_checkpoint_of_a_test_is_not_resumed(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(fit_keeping, 2, tmp_path, 2, {"save_top_k": -1})
    for after_test, directly in pool.run(fit_after_test, 2, tmp_path):
        assert torch.equal(after_test, directly)


def test_bad_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="`residuals='all'` must be one of 'per_rank', 'mean', 'drop'"):
        CommOptStrategy("int8", residuals="all")  # type: ignore[arg-type]
