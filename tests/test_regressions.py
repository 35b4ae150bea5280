"""Faults that were found by use, one test each."""

import os
from pathlib import Path

import lightning.pytorch as pl
import pytest
from torch import Tensor, nn

from lightning_commopt import CommOptStrategy, Int8, PowerSGD, TopK, Uncompressed
from lightning_commopt.routes import ControlGroup
from tests.pool import WorkerPool
from tests.strategies.toy import Batch, Regression, batches, fit


class PartlyUsed(Regression):
    """A layer that is never used is registered last, so that its gradients belong to DDP's first bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(40, 40)


def error_of_unused() -> str:
    """What a fit of a model with an unused layer raises."""
    try:
        fit(CommOptStrategy(Int8()), PartlyUsed(), batches(2))
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_an_unused_parameter_is_named_and_the_remedy_too(pool: WorkerPool) -> None:
    for text in pool.run(error_of_unused, 2):
        assert "`spare.weight` got no gradient" in text
        assert "`find_unused_parameters=True`" in text


def line_of_one_node() -> str:
    """The start line where a number of ranks a node is asked for and all ranks are one node."""
    strategy = CommOptStrategy(Int8(), hierarchy=2)
    fit(strategy, Regression(), batches(1))
    return strategy.explain()


def test_a_hierarchy_that_is_asked_for_and_not_in_force_says_so(pool: WorkerPool) -> None:
    assert all("flat since there is one node" in line for line in pool.run(line_of_one_node, 2))


class LastBucketUnused(Regression):
    """A layer that is never used is registered first, so that only DDP's last bucket waits for it."""

    def __init__(self) -> None:
        super().__init__()
        own = dict(self.named_children())
        self._modules.clear()
        self.spare = nn.Linear(40, 40)
        self._modules.update(own)


def error_of_last_bucket() -> str:
    """What a fit raises when some buckets are exchanged and the last one is not."""
    try:
        fit(CommOptStrategy(Int8(), bucket_cap_mb=0.001), LastBucketUnused(), batches(2))
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_a_bucket_that_is_not_handed_over_is_an_error_before_the_step(pool: WorkerPool) -> None:
    for text in pool.run(error_of_last_bucket, 2):
        assert "was not called for" in text
        assert "`spare.weight` got no gradient" in text or "`spare.bias` got no gradient" in text


class Unfreezes(Regression):
    """A layer is frozen when the fit begins, and becomes trainable within the second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.late = next(p for p in self.parameters()).requires_grad_(False)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.late.requires_grad_(True)
        return super().training_step(batch, batch_idx)


def error_of_unfreezing(method: str) -> str:
    """What a fit raises when a parameter becomes trainable that DDP does not know."""
    try:
        fit(CommOptStrategy(method), Unfreezes(), batches(3))
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("method", ["none", "int8"])
def test_a_parameter_unfrozen_within_a_batch_is_refused(pool: WorkerPool, method: str) -> None:
    assert all("became trainable within a batch" in text for text in pool.run(error_of_unfreezing, 2, method))


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: Int8(block="128"), "block"),  # type: ignore[arg-type]
        (lambda: Int8(stochastic="no"), "stochastic"),  # type: ignore[arg-type]
        (lambda: Int8(seed="a"), "seed"),  # type: ignore[arg-type]
        (lambda: PowerSGD(rank=2.5), "rank"),  # type: ignore[arg-type]
        (lambda: TopK(density=True), "density"),
        (lambda: Uncompressed(exact_below=2.5), "exact_below"),  # type: ignore[arg-type]
        (lambda: CommOptStrategy(Int8(), start_step=1.5), "start_step"),  # type: ignore[arg-type]
        (lambda: CommOptStrategy(Int8(), true_mean="no"), "true_mean"),  # type: ignore[arg-type]
        (lambda: CommOptStrategy(Int8), "Int8()"),  # type: ignore[arg-type]
    ],
)
def test_an_option_of_the_wrong_type_is_named(make: object, option: str) -> None:
    assert callable(make)
    with pytest.raises(TypeError, match=f"`{option}" if option != "Int8()" else r"write `Int8\(\)`"):
        make()


@pytest.mark.parametrize("cap", [-1, 0, "25", True])
def test_a_bucket_size_that_is_none_is_refused(cap: object) -> None:
    with pytest.raises(ValueError, match="bucket_cap_mb"):
        CommOptStrategy(Int8(), bucket_cap_mb=cap)


class KeepsOnException(pl.Callback):
    """Saves a checkpoint when the fit has raised, and counts what this rank then asks of the others."""

    def __init__(self) -> None:
        self.policy: object = None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        for name in ("all_gather", "gather", "broadcast"):
            setattr(ControlGroup, name, _nobody_is_there)
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        trainer.strategy.save_checkpoint(checkpoint, "emergency.ckpt")
        self.policy = checkpoint["commopt"]["policy"]


def _nobody_is_there(*_: object) -> None:
    raise AssertionError("another rank may have ended, and is asked")


class Raises(Regression):
    """Raises in the third batch."""

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        if batch_idx == 2:
            raise KeyError("planted")


def emergency(folder: str) -> object:
    """The policy with which a rank saves after an exception."""
    os.chdir(folder)
    keeper = KeepsOnException()
    with pytest.raises(KeyError):
        fit(CommOptStrategy(Int8()), Raises(), batches(4), callbacks=[keeper])
    return keeper.policy


def test_saving_after_an_exception_asks_nothing_of_other_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(emergency, 2, str(tmp_path)) == ["drop", "drop"]
    assert (tmp_path / "emergency.ckpt").exists()
