"""`uneven="error"`, and what no setting can make up for: the same text on all ranks, and nobody waits."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_commopt import CommOptStrategy
from tests.pool import WorkerPool
from tests.strategies.toy import Batch, Regression, batches
from tests.uneven.toy import METHODS, error_of, run, train_loader, uneven_fit

pytestmark = pytest.mark.runs("commopt", "uneven data")

NONE = METHODS[0]
CURE = "give every rank as many batches, as `DistributedSampler` does, or choose `uneven='trim'`"


def errors_of_uneven(counts: Sequence[int]) -> list[tuple[str, str]]:
    """With a length and without, by method."""
    return [
        (error_of(uneven_fit, case, counts, "error"), error_of(uneven_fit, case, counts, "error", sized=False))
        for case in METHODS
    ]


@pytest.mark.parametrize("counts", [(11, 9, 11), (9, 11), (5, 3, 4)], ids=str)
def test_uneven_ranks_are_told(pool: WorkerPool, counts: tuple[int, ...]) -> None:
    shortest = min(counts)
    ended = [rank for rank, count in enumerate(counts) if count == shortest]
    for by_method in pool.run(errors_of_uneven, len(counts), counts):
        for sized, unsized in by_method:
            assert sized.startswith("ValueError: Ranks have different numbers of training batches, by rank: ")
            assert str(list(counts)) in sized
            assert f"rank(s) {ended} end after {shortest}, other ranks have more than {shortest}" in unsized
            assert CURE in sized
            assert CURE in unsized
            assert "`uneven='join'`" in sized


def errors_of_empty(counts: Sequence[int]) -> list[str]:
    """Every policy, with a length and without, and with Lightning's own switch for empty loaders."""

    def module(allowed: bool) -> Regression:
        model = Regression("sgd")
        model.allow_zero_length_dataloader_with_multiple_devices = allowed
        return model

    return [
        error_of(uneven_fit, NONE, counts, policy, sized=sized, model=module(allowed))
        for policy in ("error", "trim", "join")
        for sized, allowed in ((True, False), (True, True), (False, False))
    ]


def test_a_rank_without_batches_is_named(pool: WorkerPool) -> None:
    for texts in pool.run(errors_of_empty, 3, (3, 0, 2)):
        assert len(texts) == 9
        for text in texts:
            assert text.startswith("ValueError: Rank(s) [1] have no training batch, while other ranks have"), text


def errors_of_mixed() -> str:
    """A loader that has a length on rank 0 only."""
    data = train_loader(batches(4), sized=dist.get_rank() == 0)
    return error_of(run, CommOptStrategy("none"), data)


def test_a_length_on_some_ranks_only_is_refused(pool: WorkerPool) -> None:
    for text in pool.run(errors_of_mixed, 3):
        assert "has no length on rank(s) [1, 2], and one on the others" in text


def errors_of_interval(counts: Sequence[int]) -> dict[str, str]:
    """Validation after 12 batches, which only some ranks have."""
    return {
        policy: error_of(uneven_fit, NONE, counts, policy, val_check_interval=12)
        for policy in ("error", "trim", "join")
    }


def test_validation_after_more_batches_than_remain(pool: WorkerPool) -> None:
    for texts in pool.run(errors_of_interval, 3, (12, 11, 12)):
        assert "by rank: [12, 11, 12]" in texts["error"]
        assert texts["trim"].startswith("ValueError: `val_check_interval=12` is more than the 11 training batches")
        assert texts["join"] == "nothing was raised"


class Synced(Regression):
    """Logs a mean over ranks in every step."""

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("plain", loss)
        self.log("synced", loss, sync_dist=True)
        return loss


class Normed(Regression):
    """Has a batch norm."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.layers[1] = nn.BatchNorm1d(67)


class DrawsItself(Regression):
    """Takes the iterator."""

    @override
    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
        return self.loss(next(dataloader_iter)[0])


def errors_of_join() -> dict[str, str]:
    """What cannot be joined, although ranks have as many batches."""
    texts = {}
    for name, model in {"synced": Synced("sgd"), "norm": Normed()}.items():
        for policy in ("join", "trim"):
            texts[f"{name} {policy}"] = error_of(uneven_fit, NONE, (2, 2), policy, model=model)
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(Normed())
    texts["synced norm"] = error_of(uneven_fit, NONE, (2, 2), "join", model=synced)
    for policy in ("join", "trim"):
        texts[f"iterator {policy}"] = error_of(uneven_fit, NONE, (3, 2), policy, model=DrawsItself("sgd"))
    texts["iterator unsized"] = error_of(uneven_fit, NONE, (3, 2), "join", sized=False, model=DrawsItself("sgd"))
    return texts


def test_what_cannot_be_joined(pool: WorkerPool) -> None:
    for texts in pool.run(errors_of_join, 2):
        assert (
            "`self.log('synced', ..., sync_dist=True)` in `training_step` with `uneven='join'`" in texts["synced join"]
        )
        assert "Log without `sync_dist`" in texts["synced join"]
        assert "`layers.1` is a SyncBatchNorm" in texts["synced norm"]
        assert texts["synced trim"] == texts["norm join"] == texts["norm trim"] == "nothing was raised"
        for key in ("iterator join", "iterator trim", "iterator unsized"):
            assert "draws its batches itself" in texts[key], key


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="`uneven='pad'` must be one of 'error', 'trim', 'join'"):
        CommOptStrategy("none", uneven="pad")  # type: ignore[arg-type]


def errors_after_an_epoch() -> str:
    """Rank 1 has one batch fewer from the second epoch on."""
    lengths = iter([4, 4 - dist.get_rank()])

    class Reloads(Regression):
        @override
        def train_dataloader(self) -> Any:
            return train_loader(batches(next(lengths)))

    return error_of(run, CommOptStrategy("none"), None, Reloads("sgd"), reload_dataloaders_every_n_epochs=1)


def test_a_reloaded_loader_is_compared_again(pool: WorkerPool) -> None:
    assert all("by rank: [4, 3]" in text for text in pool.run(errors_after_an_epoch, 2))


def errors_of_limits() -> dict[str, str]:
    """Without a length, but with a limit below or above what ranks have."""
    return {
        f"{policy} {limit}": error_of(uneven_fit, NONE, (6, 4), policy, sized=False, limit_train_batches=limit)
        for policy in ("error", "trim", "join")
        for limit in (4, 5, 9)
    } | {"sized 4": error_of(uneven_fit, NONE, (6, 4), "error", limit_train_batches=4)}


def test_a_limit_makes_loaders_even(pool: WorkerPool) -> None:
    for texts in pool.run(errors_of_limits, 2):
        for key, text in texts.items():
            told = key in ("error 5", "error 9")
            assert ("rank(s) [1] end after 4" in text) == told, (key, text)
            assert told or text == "nothing was raised", (key, text)
