"""Nothing of it stays in a Trainer, a checkpoint, or a run that does not need it."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_commopt import CommOptStrategy, Int8
from lightning_commopt.routes import ControlGroup
from tests.pool import WorkerPool, trainer
from tests.strategies.toy import Batch, Regression, batches, fresh_loop, loader
from tests.uneven.toy import own_batches, train_loader

pytestmark = pytest.mark.runs("commopt", "uneven data")


class Calls(pl.Callback):
    """Counts what ranks ask each other through the control group while batches are trained."""

    def __init__(self) -> None:
        self.gathered = self.reduced = 0
        self.of_batches: list[tuple[int, int]] = []

    def watch(self, control: ControlGroup) -> None:
        """Count calls from now on."""
        gather, reduce = control.all_gather, control.all_reduce

        def all_gather(value: Any) -> Any:
            self.gathered += 1
            return gather(value)

        def all_reduce(tensor: torch.Tensor) -> None:
            self.reduced += 1
            reduce(tensor)

        control.all_gather, control.all_reduce = all_gather, all_reduce  # type: ignore[method-assign]

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self.of_batches.append((self.gathered, self.reduced))


def calls_of(policy: str, sized: bool) -> Calls:
    """Fit two epochs of five batches on each rank, with validation; a method carries what is asked with gradients."""
    calls, strategy = Calls(), CommOptStrategy("int8", uneven=policy)  # type: ignore[arg-type]
    calls.setup = lambda *_, **__: calls.watch(strategy._control)  # type: ignore[method-assign]
    options: dict[str, Any] = {"use_distributed_sampler": False, "num_sanity_val_steps": 0}
    fitter = trainer(dist.get_world_size(), strategy, max_epochs=2, callbacks=[calls], **options)
    fitter.fit(Regression(), train_loader(batches(5), sized), loader(batches(2)))
    calls.setup = None  # type: ignore[method-assign,assignment]
    return calls


def test_batches_with_a_length_cost_nothing(pool: WorkerPool) -> None:
    for calls in pool.run(calls_of, 2, "error", True):
        first = calls.of_batches[0]
        assert calls.of_batches == [first] * 10
        assert first[1] == 0


def test_batches_without_a_length_cost_one_small_reduction(pool: WorkerPool) -> None:
    for calls in pool.run(calls_of, 2, "error", False):
        gathered = calls.of_batches[0][0]
        assert calls.of_batches == [(gathered, i) for i in range(1, 11)]


def fit_twice(folder: Path) -> tuple[list[int], list[str], list[str], list[str]]:
    """One Trainer fits twice, another number of batches each time."""
    strategy = CommOptStrategy(Int8(), uneven="trim")
    model, steps, patched = Regression(), [], []
    fitter = trainer(dist.get_world_size(), strategy, max_epochs=1, use_distributed_sampler=False)
    before = [type(callback).__name__ for callback in fitter.callbacks]
    for counts in ((4, 3), (2, 3)):
        fitter.fit(model, loader(own_batches(counts)))
        steps.append(fitter.global_step)
        loops = (fitter.fit_loop, fitter.fit_loop.epoch_loop.val_loop, fitter.validate_loop, fitter.test_loop)
        patched += [type(loop).__name__ for loop in loops if "setup_data" in vars(loop)]
        fitter.save_checkpoint(folder / "after.ckpt")
        fitter.fit_loop = fresh_loop(fitter)
        fitter.validate(model, loader(batches(2)), verbose=False)
        fitter.test(model, loader(batches(2)), verbose=False)
        patched += [type(loop).__name__ for loop in loops if "setup_data" in vars(loop)]
    after = [type(callback).__name__ for callback in fitter.callbacks]
    kept = sorted(torch.load(folder / "after.ckpt", weights_only=True)["callbacks"])
    return steps, patched, [name for name in after if name not in before], kept


def test_two_fits_of_one_trainer(pool: WorkerPool, tmp_path: Path) -> None:
    for rank in pool.run(fit_twice, 2, tmp_path):
        assert rank == ([3, 2], [], [], [])


class Copies(pl.Callback):
    """Copies the strategy's part during a fit."""

    def __init__(self) -> None:
        self.copied: list[str] = []

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, CommOptStrategy)
        copied = pickle.loads(pickle.dumps(strategy._uneven))
        self.copied.append(f"{copied.policy} {copied._control}")


def copies_during_a_fit() -> list[str]:
    """What a copy made during a fit is."""
    copies = Copies()
    fitter = trainer(dist.get_world_size(), CommOptStrategy("none", uneven="join"), max_epochs=1, callbacks=[copies])
    fitter.fit(Regression(), loader(batches(2)))
    return copies.copied


def test_a_copy_begins_unattached(pool: WorkerPool) -> None:
    assert pool.run(copies_during_a_fit, 2) == [["join None"]] * 2


def fit_alone() -> tuple[int, bool]:
    """One process: nobody to agree with."""
    strategy = CommOptStrategy("none")
    fitter = trainer(1, strategy, max_epochs=2)
    fitter.fit(Regression(), train_loader(batches(3), sized=False))
    return fitter.global_step, strategy._control_group is None


def test_one_process_agrees_with_nobody(pool: WorkerPool) -> None:
    assert pool.run(fit_alone, 1) == [(6, True)]


class TwoLoaders(Regression):
    """May validate on several loaders."""

    @override
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.loss(batch)


def warnings_of_evaluation(counts: tuple[int, ...]) -> dict[str, list[str]]:
    """What is said about validation in a fit of two epochs, and about validate and test."""
    said = {}
    data, other = loader(batches(counts[dist.get_rank()])), loader(batches(1))
    for kind in ("fit", "validate", "test"):
        fitter = trainer(dist.get_world_size(), CommOptStrategy("none"), max_epochs=2, use_distributed_sampler=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if kind == "fit":
                fitter.fit(TwoLoaders(), loader(batches(2)), [other, data])
            else:
                getattr(fitter, kind)(Regression(), data, verbose=False)
        said[kind] = [text for w in caught if "Ranks have different numbers of" in (text := str(w.message))]
    return said


def test_uneven_evaluation_is_said_once(pool: WorkerPool) -> None:
    first, *others = pool.run(warnings_of_evaluation, 2, (2, 3))
    assert [len(texts) for texts in first.values()] == [1, 1, 1]
    assert "numbers of validation batches, by rank: [[1, 2], [1, 3]]" in first["fit"][0]
    assert "numbers of validation batches, by rank: [[2], [3]]" in first["validate"][0]
    assert "numbers of test batches, by rank: [[2], [3]]" in first["test"][0]
    assert [other == {"fit": [], "validate": [], "test": []} for other in others] == [True]
    even = pool.run(warnings_of_evaluation, 2, (2, 2))
    assert not any(texts for rank in even for texts in rank.values())
