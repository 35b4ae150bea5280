"""Cases from the field under the Trainer: really on, bytes, true units, zero gradients, equal replicas, two fits."""

import contextlib
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_commopt import BF16, CommOptStrategy, Compression, Int8, Uncompressed
from lightning_commopt.compression import METHODS
from lightning_commopt.compression.layout import round_up
from lightning_commopt.routes import PinnedDDP
from tests.methods import Case
from tests.pool import WorkerFailure, WorkerPool, trainer
from tests.strategies.toy import (
    Batch,
    ByHand,
    Fit,
    Regression,
    ScaledFP32,
    batches,
    compresses,
    each_method,
    each_route,
    fit,
    flat,
    fresh_loop,
    loader,
    strategy_of,
)

pytestmark = pytest.mark.runs("commopt", "training, all cases")

# ---- really on ------------------------------------------------------------------------------------------------------


def fit_by_name(name: str) -> Fit:
    """Four steps under a registered name."""
    return fit(name, Regression(), batches(4))


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_name_is_really_on(pool: WorkerPool, method: type[Compression]) -> None:
    for ran in pool.run(fit_by_name, 2, f"commopt_{method.name}"):
        assert ran.stats is not None
        assert ran.stats.method == method.name
        assert ran.stats.rounds == ran.steps == 4
        on = method is not Uncompressed
        assert ran.stats.hook_calls == 4 * ran.buckets * on
        assert bool(ran.hook) == on


def fit_small_buckets(case: Case) -> Fit:
    """Four steps with at least three buckets."""
    return fit(strategy_of(case), Regression(), batches(4))


@each_route(compresses)
def test_hook_calls_are_buckets_times_steps(pool: WorkerPool, case: Case, world: int) -> None:
    for ran in pool.run(fit_small_buckets, world, case):
        assert ran.stats is not None
        assert ran.buckets >= 3
        assert ran.stats.hook_calls == 4 * ran.buckets
        assert ran.stats.applied_steps == ran.stats.rounds == 4
        assert ran.stats.skipped_steps == 0


def fit_without_hook(case: Case) -> None:
    """The registration is lost, as on the CPU under Lightning's own strategy."""
    PinnedDDP.register_comm_hook = lambda *args, **kwargs: None  # type: ignore[method-assign]
    fit(strategy_of(case), Regression(), batches(4))


@each_method(compresses)
def test_zero_hook_calls_raise(pool: WorkerPool, case: Case, world: int) -> None:
    with pytest.raises(WorkerFailure) as caught:
        pool.run(fit_without_hook, world, case)
    assert {error.type_name for error in caught.value.errors.values()} == {"RuntimeError"}
    assert all(f"`{case.method.name}` was not called" in error.message for error in caught.value.errors.values())


# ---- bytes ----------------------------------------------------------------------------------------------------------


class OneLayer(pl.LightningModule):
    """One 256 x 256 layer with bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layer(batch).square().mean()
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@contextlib.contextmanager
def counted_bytes(strategy: CommOptStrategy) -> Iterator[list[int]]:
    """Add up numel x element size of what is sent in the groups that carry gradients, where torch issues it."""
    counted, send, reduce = [0], dist.isend, dist.all_reduce

    def count(tensor: Tensor, group: Any, times: float = 1.0) -> None:
        if strategy._groups is not None and group in (strategy._groups[1].gradients, strategy._groups[1].node):
            counted[0] += int(times * tensor.numel() * tensor.element_size())

    def isend(tensor: Tensor, *, group: Any, group_dst: int) -> Any:
        count(tensor, group)
        return send(tensor, group=group, group_dst=group_dst)

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        ranks = dist.get_world_size(group)
        count(tensor, group, 2 * (ranks - 1) / ranks * (tensor.numel() > 1))  # one element: the first of a group
        return reduce(tensor, op, group, async_op)

    dist.isend, dist.all_reduce = isend, all_reduce  # type: ignore[assignment]
    yield counted
    dist.isend, dist.all_reduce = send, reduce


def fit_counted(case: Case, start_step: int) -> tuple[int, Fit]:
    """Five steps of the one layer, bytes counted from outside."""
    strategy = strategy_of(case, start_step=start_step)
    with counted_bytes(strategy) as counted:
        ran = fit(strategy, OneLayer(), list(torch.randn(5, 4, 256)))
    return counted[0], ran


@each_route(compresses)
@pytest.mark.parametrize("start_step", [0, 2])
def test_bytes_promised_are_bytes_sent(pool: WorkerPool, case: Case, world: int, start_step: int) -> None:
    for counted, ran in pool.run(fit_counted, world, case, start_step):
        assert ran.stats is not None
        assert ran.stats.promised.total == ran.stats.sent_bytes
        assert ran.stats.sent_bytes == pytest.approx(counted, abs=2 * ran.stats.rounds)  # a ring's share is rounded
        dense = 4 * (65536 + 256)
        assert ran.stats.dense_bytes == 5 * (2 * (world - 1) * dense // world)
        if not case.hierarchy:
            step = compressed_bytes(case.method, world) + 4 * 256
            formula = 2 * (world - 1) * ((5 - start_step) * step + start_step * dense) / world
            assert formula <= counted <= 1.05 * formula


def compressed_bytes(method: Compression, world: int) -> int:
    """Documented bytes of the 256 x 256 matrix, in as many chunks as ranks own one; to 5 % where shapes matter."""
    chunks = 1 if method.summable or world == 2 else world
    return method.wire_bytes(round_up(65536, method.alignment * chunks) // chunks) * chunks


# ---- true units -----------------------------------------------------------------------------------------------------


def fit_under_scales(case: Case) -> list[Tensor]:
    """Eight steps: no scaler, a constant scale, one that is halved in between."""
    plugins: list[list[Any]] = [[], [ScaledFP32(1024.0)], [ScaledFP32(1024.0, halved_after=3)]]
    return [fit(strategy_of(case), Regression("sgd"), batches(8), plugins=p).parameters for p in plugins]


@each_method()
def test_loss_scale_changes_no_bit(pool: WorkerPool, case: Case, world: int) -> None:
    for unscaled, constant, halved in pool.run(fit_under_scales, world, case):
        assert torch.equal(constant, unscaled)
        assert torch.equal(halved, unscaled)


# ---- zero gradients -------------------------------------------------------------------------------------------------


class TwoHeads(pl.LightningModule):
    """The gradient of one head is all zero for three steps on all ranks, then for three on rank 1 alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(40, 40), nn.Linear(40, 40)
        self.moved: list[float] = []

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.moved.append(self.left.weight.detach().sum().item())
        off = batch_idx < 3 or (batch_idx < 6 and self.global_rank == 1)
        loss: Tensor = (self.left(batch[0]) * (not off) + self.right(batch[0]) - batch[1]).square().mean()
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit_zero_gradients(case: Case) -> tuple[list[float], Tensor]:
    """Eight steps."""
    model = TwoHeads()
    return model.moved, fit(strategy_of(case), model, batches(8)).parameters


@each_route()
def test_zero_gradients_stay_zero_and_finite(pool: WorkerPool, case: Case, world: int) -> None:
    ranks = pool.run(fit_zero_gradients, world, case)
    for moved, parameters in ranks:
        assert len(set(moved[:4])) == 1
        assert len(set(moved[3:])) == 5
        assert parameters.isfinite().all()
        assert torch.equal(parameters, ranks[0][1])


# ---- equal replicas -------------------------------------------------------------------------------------------------


def fit_both_ways(case: Case) -> tuple[list[Fit], bool]:
    """Ten steps each, and whether the ranks' data differ."""
    data = batches(10)
    everyone = [torch.zeros_like(data[0][0]) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, data[0][0])
    return [fit(strategy_of(case), model, data) for model in (Regression(), ByHand())], not torch.equal(*everyone[:2])


@each_route()
def test_replicas_are_bit_equal(pool: WorkerPool, case: Case, world: int) -> None:
    ranks = pool.run(fit_both_ways, world, case)
    automatic, manual = ranks[0][0]
    for fits, different_data in ranks:
        assert different_data
        assert all(ran.steps == 10 for ran in fits)
        assert torch.equal(fits[0].parameters, automatic.parameters)
        assert torch.equal(fits[1].parameters, manual.parameters)
    assert torch.equal(automatic.parameters, manual.parameters)


# ---- two fits -------------------------------------------------------------------------------------------------------


def fit_a_b_a(case: Case) -> tuple[list[Fit], Fit]:
    """One strategy object fits A, a differently shaped B, and A again; and a fresh one fits A."""
    strategy = strategy_of(case)
    fitter = trainer(dist.get_world_size(), strategy, max_epochs=1, use_distributed_sampler=False)
    fits = []
    for kind in (Regression, TwoHeads, Regression):
        model = kind()
        fitter.fit_loop = fresh_loop(fitter)
        fitter.fit(model, loader(batches(5)))
        fits.append(Fit(flat(model), [], fitter.global_step, strategy.comm_stats(), 0, "", strategy.explain()))
    return fits, fit(strategy_of(case), Regression(), batches(5))


@each_method()
def test_two_fits_with_one_strategy(pool: WorkerPool, case: Case, world: int) -> None:
    for (first, other, again), fresh in pool.run(fit_a_b_a, world, case):
        assert torch.equal(first.parameters, fresh.parameters)
        assert torch.equal(again.parameters, fresh.parameters)
        assert other.parameters.numel() == 2 * 41 * 40
        for ran in (first, other, again):
            assert ran.stats is not None
            assert ran.stats.rounds == 5
        assert again.stats is not None
        assert fresh.stats is not None
        assert again.stats.promised == first.stats.promised == fresh.stats.promised  # type: ignore[union-attr]


def fit_with_options() -> list[Any]:
    """Options reach the codec."""
    fits = [fit(strategy_of(Case(m)), Regression(), batches(2)) for m in (Int8(block=8), Int8(), BF16())]
    return [ran.stats.promised.payload for ran in fits if ran.stats is not None]


def test_options_are_in_force(pool: WorkerPool) -> None:
    small_blocks, int8, bf16 = pool.run(fit_with_options, 2)[0]
    assert int8 < small_blocks < bf16
