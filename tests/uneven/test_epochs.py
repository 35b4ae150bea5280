"""What depends on the number of batches of an epoch is the same on all ranks: validation, schedules, resume."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from typing_extensions import override

from tests.methods import Case
from tests.pool import WorkerPool
from tests.strategies.toy import Batch, Regression, strategy_of
from tests.uneven.toy import METHODS, Ran, own_batches, run, uneven_fit

pytestmark = pytest.mark.runs("commopt", "uneven data")

NONE, INT8 = METHODS[:2]


def fit_with_interval(counts: Sequence[int], interval: float | int, sized: bool) -> dict[str, Ran]:
    """Trimmed and joined."""
    return {
        policy: uneven_fit(NONE, counts, policy, sized=sized, val_check_interval=interval)
        for policy in ("trim", "join")
    }


@pytest.mark.parametrize(("interval", "sized"), [(0.5, True), (3, False)])
def test_ranks_validate_after_the_same_batches(pool: WorkerPool, interval: float | int, sized: bool) -> None:
    counts = (12, 9, 12)
    ranks = pool.run(fit_with_interval, 3, counts, interval, sized)
    for policy, length in (("trim", 9), ("join", 12)):
        every = max(1, int(interval * length)) if isinstance(interval, float) else interval
        expected = [(epoch, batch) for epoch in (0, 1) for batch in range(every - 1, length, every)]
        for rank in ranks:
            assert rank[policy].when("validated") == expected
            assert torch.equal(rank[policy].parameters, ranks[0][policy].parameters)


class Scheduled(Regression):
    """A learning rate that depends on the number of steps of the fit."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.estimated = 0.0

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        self.estimated = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, int(self.estimated))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit_scheduled() -> dict[str, tuple[float, Ran]]:
    """Trimmed and joined."""
    fits = {}
    for policy in ("trim", "join"):
        model = Scheduled()
        fits[policy] = uneven_fit(NONE, (6, 4), policy, model=model), model.estimated
    return {policy: (estimated, ran) for policy, (ran, estimated) in fits.items()}


def test_estimated_steps_are_those_that_are_done(pool: WorkerPool) -> None:
    ranks = pool.run(fit_scheduled, 2)
    for policy, steps in (("trim", 8), ("join", 12)):
        for rank in ranks:
            estimated, ran = rank[policy]
            assert estimated == ran.steps == steps
            assert ran.planned == steps / 2
            assert torch.equal(ran.parameters, ranks[0][policy][1].parameters)


class Resumable:
    """A loader that knows its place.

    Args:
        data: Its batches.
        sized: Whether it tells its length.
    """

    def __init__(self, data: Sequence[Batch], sized: bool) -> None:
        self.data = data
        self.place = self.begin = 0
        if sized:
            self.__class__ = SizedResumable

    def __iter__(self) -> Iterator[Batch]:
        self.place, self.begin = self.begin, 0
        while self.place < len(self.data):
            self.place += 1
            yield self.data[self.place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.begin = state["place"]


class SizedResumable(Resumable):
    """The same with a length."""

    def __len__(self) -> int:
        return len(self.data)


class SaveAt(pl.Callback):
    """Saves a checkpoint after a batch of the first epoch."""

    def __init__(self, path: Path, batch: int) -> None:
        self.path = path
        self.batch = batch

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.current_epoch == 0 and batch_idx == self.batch:
            trainer.save_checkpoint(self.path)


def fit_and_resume(
    case: Case, counts: Sequence[int], policy: str, sized: bool, window: int, at: int, folder: Path
) -> tuple[Ran, Ran]:
    """Uninterrupted, and resumed in the middle of the first epoch."""
    path, options = folder / "at.ckpt", {"accumulate_grad_batches": window}

    def fitted(**more: Any) -> Ran:
        data = Resumable(own_batches(counts), sized)
        return run(strategy_of(case, uneven=policy), data, Regression(), **options, **more)

    return fitted(callbacks=[SaveAt(path, at)]), fitted(ckpt_path=path)


RESUMED = [("trim", 1, 6), ("trim", 4, 7), ("join", 1, 10), ("join", 4, 7)]
"""Policy, window, and the batch after which is saved: under ``join`` once when a rank has ended."""


@pytest.mark.parametrize(("policy", "window", "at"), RESUMED)
def test_resume_within_an_epoch(pool: WorkerPool, policy: str, window: int, at: int, tmp_path: Path) -> None:
    counts = (12, 9, 12)
    ranks = pool.run(fit_and_resume, 3, INT8, counts, policy, True, window, at, tmp_path)
    for whole, resumed in ranks:
        assert resumed.events == [event for event in whole.events if event[1:] > (0, at)]
        assert resumed.steps == whole.steps
        assert torch.equal(resumed.parameters, whole.parameters)
        assert torch.equal(resumed.parameters, ranks[0][1].parameters)


@pytest.mark.parametrize(("policy", "window", "at"), RESUMED[1:3])
def test_resume_within_an_epoch_without_a_length(
    pool: WorkerPool, policy: str, window: int, at: int, tmp_path: Path
) -> None:
    """Lightning looks one batch ahead there, and loses it at a resume: so the reference is a resume on even ranks."""
    counts = (12, 9, 12)
    ranks = pool.run(fit_and_resume, 3, INT8, counts, policy, False, window, at, tmp_path)
    even = pool.run(fit_and_resume, 3, INT8, [9 if policy == "trim" else 12] * 3, "error", False, window, at, tmp_path)
    for (_, resumed), (_, expected) in zip(ranks, even, strict=True):
        assert resumed.events == expected.events
        assert torch.equal(resumed.parameters, ranks[0][1].parameters)
        assert policy == "join" or torch.equal(resumed.parameters, expected.parameters)
