"""SIGTERM to one rank ends all of them at the same step, and costs no collective where gradients travel anyway."""

import json
import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from typing_extensions import override

from lightning_commopt import BF16, CommOptStrategy, Int8, PowerSGD, Uncompressed
from lightning_commopt.strategies.residual_checkpoint import KEY
from tests.methods import Case
from tests.pool import WorkerPool, trainer
from tests.strategies import terminated
from tests.strategies.test_launch import LIMIT, run
from tests.strategies.toy import Batch, Regression, batches, fit, flat, loader, strategy_of

pytestmark = pytest.mark.runs("commopt", "SIGTERM")

INT8, NONE = Case(Int8()), Case(Uncompressed())


class Terminated(Regression):
    """One rank gets the signal as a batch begins, of training or of validation."""

    def __init__(self, rank: int, batch: int, validating: bool = False) -> None:
        super().__init__()
        self.rank, self.batch, self.validating = rank, batch, validating

    def signal(self, validating: bool, batch_idx: int) -> None:
        if (self.global_rank, validating, batch_idx) == (self.rank, self.validating, self.batch):
            os.kill(os.getpid(), signal.SIGTERM)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.signal(False, batch_idx)
        return super().training_step(batch, batch_idx)

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.signal(True, batch_idx)
        return super().validation_step(batch, batch_idx)


@dataclass
class Ended:
    """How a rank ended.

    Args:
        batches: That it trained on.
        steps: Of its optimizer.
        parameters: Of the model.
        left: What still replaces Lightning's own methods.
        handler: Whether the signal's own handler is back.

    """

    batches: int
    steps: int
    parameters: Tensor
    left: set[str]
    handler: bool


def end(case: Case, rank: int, *, batch: int = 3, validating: bool = False, **options: Any) -> Ended:
    """Fit until the signal ends it."""
    model = Terminated(rank, batch, validating)
    before = signal.getsignal(signal.SIGTERM)
    own = {k: options.pop(k) for k in ("start_step", "nonfinite") if k in options}
    fitter = trainer(
        dist.get_world_size(),
        strategy_of(case, **own),
        max_epochs=2,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **options,
    )
    with pytest.raises(SIGTERMException):
        fitter.fit(model, loader(batches(8)), loader(batches(2)))
    connector: Any = fitter._signal_connector
    left = {"_sigterm_notifier_fn", "_broadcast_sigterm_tensor"} & {*vars(connector), *vars(fitter.fit_loop.epoch_loop)}
    handler = signal.getsignal(signal.SIGTERM) == before
    return Ended(len(model.losses), fitter.global_step, flat(model), left, handler)


CASES: dict[str, tuple[Case, int, dict[str, Any]]] = {
    "one hop": (INT8, 2, {}),
    "two hops": (Case(BF16()), 3, {}),
    "all-reduce": (Case(PowerSGD(rank=2)), 3, {}),
    "dense beginning": (INT8, 3, {"start_step": 100}),
    "hierarchy": (replace(INT8, hierarchy=2), 4, {}),
    "skip": (INT8, 2, {"nonfinite": "skip"}),
    "none": (NONE, 3, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_end_after_the_same_step(pool: WorkerPool, name: str) -> None:
    case, world, options = CASES[name]
    ranks = pool.run(end, world, case, world - 1, **options)
    for ended in ranks:
        assert (ended.batches, ended.steps) == (4, 4)
        assert torch.equal(ended.parameters, ranks[0].parameters)
        assert not ended.left
        assert ended.handler


@pytest.mark.parametrize("case", [INT8, NONE], ids=["int8", "none"])
def test_at_the_end_of_an_accumulation_window(pool: WorkerPool, case: Case) -> None:
    for ended in pool.run(end, 2, case, 0, batch=2, accumulate_grad_batches=2):
        assert ended.steps == (2 if case is INT8 else 1)
        assert ended.batches == (4 if case is INT8 else 3)  # Lightning's own question is asked before every batch


@pytest.mark.parametrize("case", [INT8, NONE], ids=["int8", "none"])
def test_during_validation(pool: WorkerPool, case: Case) -> None:
    for ended in pool.run(end, 2, case, 1, batch=1, validating=True):
        assert ended.steps == (9 if case is INT8 else 8)  # an epoch has eight steps; a validation follows


def save_on_sigterm(folder: Path) -> tuple[list[str], int]:
    """The checkpoint that Lightning's callback writes then, and a resume from it."""
    keep = OnExceptionCheckpoint(folder, "ended")
    with pytest.raises(SIGTERMException):
        fit(strategy_of(INT8), Terminated(1, 3), batches(8), callbacks=[keep], enable_checkpointing=True)
    dist.barrier()
    resumed = fit(strategy_of(INT8), Regression(), batches(8), folder / "ended.ckpt", max_epochs=2)
    return [text for text in resumed.warnings if "esidual" in text], resumed.steps


def test_the_last_checkpoint_keeps_the_residuals(pool: WorkerPool, tmp_path: Path) -> None:
    for warnings, steps in pool.run(save_on_sigterm, 2, tmp_path):
        assert not warnings
        assert steps > 4
    entry = torch.load(tmp_path / "ended.ckpt", weights_only=True)[KEY]
    assert len(entry["residuals"]) == 2


def validate_signalled() -> int:
    """Outside a fit a rank ends by itself, without waiting for another."""
    model = Terminated(1, 0, validating=True)
    seen: list[int] = []
    model.on_validation_batch_end = lambda *_: seen.append(1)  # type: ignore[method-assign]
    fitter = trainer(dist.get_world_size(), strategy_of(INT8), use_distributed_sampler=False)
    if dist.get_rank() == 1:
        with pytest.raises(SIGTERMException):
            fitter.validate(model, loader(batches(3)), verbose=False)
    else:
        fitter.validate(model, loader(batches(3)), verbose=False)
    return len(seen)


def test_outside_a_fit(pool: WorkerPool) -> None:
    assert pool.run(validate_signalled, 2) == [3, 1]


# ---- its cost -------------------------------------------------------------------------------------------------------


class Collectives(pl.Callback):
    """Counts collectives of all ranks together, and of agreement, between the first and the last batch of an epoch."""

    def __init__(self) -> None:
        self.counts: list[list[int]] = []

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        groups = [dist.group.WORLD]
        if isinstance(trainer.strategy, CommOptStrategy):
            groups.append(trainer.strategy._control.group)
        self.counts.append([group._get_sequence_number_for_group() for group in groups if group is not None])

    def per_batch(self) -> list[float]:
        """By group."""
        steps = len(self.counts) - 2  # DDP rebuilds its buckets in the second batch
        return [(last - first) / steps for first, last in zip(self.counts[1], self.counts[-1], strict=True)]


def collectives_of(strategies: list[Any]) -> list[list[float]]:
    """Of a batch, for each strategy."""
    results = []
    for strategy in strategies:
        count = Collectives()
        fit(strategy, Regression(), batches(8), callbacks=[count])
        results.append(count.per_batch())
    return results


def test_no_hidden_collective(pool: WorkerPool) -> None:
    chosen = [DDPStrategy(), strategy_of(NONE, bucket_cap_mb=25), strategy_of(INT8), strategy_of(Case(PowerSGD()))]
    for stock, none, int8, powersgd in pool.run(collectives_of, 2, chosen):
        assert stock == [2]  # gradients, and the broadcast
        assert none == [1, 1]  # the same, one of them without the device
        assert int8 == powersgd == [0, 0]  # everything is in the group for gradients


# ---- real launch ----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(LIMIT + 60)
def test_under_popen(tmp_path: Path) -> None:
    output = run([sys.executable, terminated.__file__, "{folder}"], tmp_path)
    for strategy, _ in terminated.FITS:
        zero, one = (json.loads((tmp_path / f"{strategy}.{rank}.json").read_text()) for rank in range(2))
        assert zero == one, output
        assert zero["error"] == "SIGTERMException"
        assert 4 <= zero["steps"] < terminated.STEPS
