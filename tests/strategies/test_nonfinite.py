"""A gradient that is not finite on one rank: every rank does the same, once, and nothing stays spoilt."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from typing_extensions import override

from tests.methods import Case
from tests.pool import WorkerPool, trainer
from tests.strategies.toy import (
    SMALL_BUCKETS,
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
    same_bits,
    state_of,
    strategy_of,
    tensors_of,
)

pytestmark = pytest.mark.runs("commopt", "non-finite gradients")

BAD = 5
"""The step in which rank 1 alone spoils its loss."""


class Journal(pl.Callback):
    """Writes down the loss scale after each batch, and weights and state of the exchange around the bad one."""

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.states: list[Any] = []
        self.weights: list[Tensor] = []

    def _note(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.states.append(state_of(trainer.strategy))
        self.weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]).clone())

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == BAD:
            self._note(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.scales.append(scaler.get_scale() if scaler is not None else 1.0)
        if batch_idx == BAD:
            self._note(trainer, pl_module)

    def assert_untouched(self) -> None:
        """The bad step changed neither weights nor state, and all of it is finite."""
        assert torch.equal(*self.weights)
        assert same_bits(*self.states)
        assert all(t.isfinite().all() for t in tensors_of([self.weights, self.states]))


class Spoilt(NamedTuple):
    """A fit with one bad step."""

    fit: Fit
    journal: Journal


class OneBadGradient(Regression):
    """One parameter's gradient alone is not finite, on rank 1, in one step."""

    def __init__(self, parameter: str = "layers.3.weight", manual: bool = False) -> None:
        super().__init__()
        self.bad_parameter = parameter
        self.automatic_optimization = not manual
        self.bad_now = False

    @override
    def on_train_start(self) -> None:
        bad = self.get_parameter(self.bad_parameter)
        bad.register_hook(lambda g: g * float("nan") if self.bad_now and self.global_rank == 1 else g)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.bad_now = batch_idx == BAD
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss


def assert_near(case: Case, ran: Fit, stock: Fit) -> None:
    """The mean loss of the last ten batches is near stock DDP's.

    Casts and methods of 4 bit or more: within half of what these batches scatter under stock DDP, which is 1.6 standard
    errors of the mean of ten. Coarser methods delay gradients by several steps: half of what stock DDP has gained.
    """
    last, reference = torch.tensor(ran.losses[-10:]), torch.tensor(stock.losses[-10:])
    gained = stock.losses[0] - reference.mean()
    assert gained > 0.1 * stock.losses[0]
    if case.method.loss_safety == "C":
        assert ran.losses[0] - last.mean() > 0.5 * gained
    else:
        assert (last.mean() - reference.mean()).abs() < 0.5 * reference.std()


# ---- with a gradient scaler -----------------------------------------------------------------------------------------


def fit_scaled(case: Case | None, optimizer: str, clip: float | None, steps: int) -> Spoilt:
    """Steps in fp16, rank 1 alone yields inf in one; ``None`` is stock DDP."""
    strategy = DDPStrategy(**SMALL_BUCKETS) if case is None else strategy_of(case)  # type: ignore[arg-type]
    # Lightning itself turns 16-mixed on the CPU into bf16 without a scaler
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    journal = Journal()
    options: dict[str, Any] = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)], "gradient_clip_val": clip}
    ran = fit(strategy, Regression(optimizer, spoilt=(1, BAD)), batches(steps), callbacks=[journal], **options)
    return Spoilt(ran, journal)


def fit_all_scaled(case: Case | None) -> dict[str, Spoilt]:
    """Thirty plain steps, and short runs with clipping and with a fused optimizer."""
    return {
        "plain": fit_scaled(case, "adamw", None, 30),
        "clipped": fit_scaled(case, "adamw", 0.1, 8),
        "fused": fit_scaled(case, "fused", None, 8),
    }


@pytest.fixture(scope="module")
def stock(pool: WorkerPool) -> Callable[[int], list[dict[str, Spoilt]]]:
    """The runs under stock DDP, of a world size."""
    return cache(lambda world: pool.run(fit_all_scaled, world, None))


@each_route()
def test_scaler_skips_once_on_all_ranks(pool: WorkerPool, case: Case, world: int, stock: Any) -> None:
    ranks = pool.run(fit_all_scaled, world, case)
    for rank, runs in enumerate(ranks):
        for kind, (ran, journal) in runs.items():
            steps = ran.steps
            assert journal.scales == [1024.0] * BAD + [512.0] * (steps - BAD)
            journal.assert_untouched()
            assert torch.equal(ran.parameters, ranks[0][kind].fit.parameters)
            if compresses(case):
                assert ran.stats is not None
                counts = (ran.stats.applied_steps, ran.stats.skipped_steps, ran.stats.rounds)
                assert counts == (steps - 1, 1, steps)
        assert runs["plain"].fit.steps == 30
        assert_near(case, runs["plain"].fit, stock(world)[rank]["plain"].fit)


def fit_with_and_without(case: Case) -> list[Tensor]:
    """A run in which the scaler skips one step for one bad gradient, and one without it, automatic and by hand."""
    data, results = batches(8), []
    for manual in (False, True):
        plugins: list[Any] = [ScaledFP32(1024.0)]
        results.append(fit(strategy_of(case), OneBadGradient(manual=manual), data, plugins=plugins).parameters)
        clean = ByHand() if manual else Regression()
        results.append(fit(strategy_of(case), clean, data[:BAD] + data[BAD + 1 :]).parameters)
    return results


@each_route(lambda case: compresses(case) and case.round_free)
def test_step_skipped_by_the_scaler_never_was(pool: WorkerPool, case: Case, world: int) -> None:
    for bad, clean, bad_by_hand, clean_by_hand in pool.run(fit_with_and_without, world, case):
        assert torch.equal(bad, clean)
        assert torch.equal(bad_by_hand, clean_by_hand)


# ---- without one: error ---------------------------------------------------------------------------------------------


class Raised(NamedTuple):
    """The error of one rank, and how it left the exchange."""

    kind: str
    text: str
    applied_steps: int
    finite: bool


ERRORS = {
    "compressed": ("layers.3.weight", False, 1),
    "exact": ("layers.0.bias", False, 1),
    "manual": ("layers.3.weight", True, 1),
    "accumulated": ("layers.1.bias", False, 3),
}


def raise_all(case: Case) -> dict[str, Raised]:
    """Each error of :data:`ERRORS`, caught."""
    return {kind: raise_one(case, *options) for kind, options in ERRORS.items()}


def raise_one(case: Case, parameter: str, manual: bool, accumulate: int) -> Raised:
    """Fit until one gradient is not finite."""
    strategy = strategy_of(case, nonfinite="error")
    try:
        fit(strategy, OneBadGradient(parameter, manual), batches(8), accumulate_grad_batches=accumulate)
    except Exception as error:
        finite = all(t.isfinite().all() for t in tensors_of(state_of(strategy)))
        return Raised(type(error).__name__, str(error), strategy.comm_stats().applied_steps, finite)
    return Raised("", "nothing was raised", -1, False)


@each_route(compresses)
def test_error_is_the_same_on_all_ranks(pool: WorkerPool, case: Case, world: int) -> None:
    ranks = pool.run(raise_all, world, case)
    assert ranks == [ranks[0]] * world
    for kind, (parameter, _, accumulate) in ERRORS.items():
        raised = ranks[0][kind]
        assert raised.kind == "FloatingPointError"
        assert f"`{parameter}`" in raised.text
        assert "on rank(s) [1] in round" in raised.text
        assert "nonfinite='skip'" in raised.text
        assert raised.applied_steps == BAD // accumulate
        assert raised.finite


def raise_twice(case: Case) -> tuple[list[str], bool]:
    """With the default, twice from the start in one Trainer; and whether a good fit after it is as a fresh one."""
    strategy, texts = strategy_of(case), []
    fitter = trainer(dist.get_world_size(), strategy, max_epochs=1, use_distributed_sampler=False)
    models = [Regression(spoilt=(0, BAD), factor=float("nan")) for _ in range(2)] + [Regression()]
    for model in models:
        fitter.fit_loop = fresh_loop(fitter)
        try:
            fitter.fit(model, loader(batches(8)))
        except FloatingPointError as error:
            texts.append(str(error))
    return texts, torch.equal(flat(models[-1]), fit(strategy_of(case), Regression(), batches(8)).parameters)


@each_method(lambda case: case.lossy)
def test_error_is_the_default_and_a_new_fit_is_clean(pool: WorkerPool, case: Case, world: int) -> None:
    for texts, same in pool.run(raise_twice, world, case):
        assert len(texts) == 2
        assert "on rank(s) [0] in round 6" in texts[0]
        assert texts[0] == texts[1]
        assert same


# ---- without one: skip ----------------------------------------------------------------------------------------------


def fit_skipping(case: Case) -> list[tuple[Fit, Journal, Fit]]:
    """Runs whose sixth step is skipped, each with one that never had it: all bad, one bad and clipped, by hand."""
    data, results = batches(8), []
    kinds: list[tuple[Regression, Regression, dict[str, Any]]] = [
        (Regression(spoilt=(1, BAD), factor=float("nan")), Regression(), {}),
        (OneBadGradient(), Regression(), {"gradient_clip_val": 0.05}),
        (OneBadGradient(manual=True), ByHand(), {}),
    ]
    for spoilt, never_spoilt, options in kinds:
        journal = Journal()
        bad = fit(strategy_of(case, nonfinite="skip"), spoilt, data, callbacks=[journal], **options)
        clean = fit(strategy_of(case), never_spoilt, data[:BAD] + data[BAD + 1 :], **options)
        results.append((bad, journal, clean))
    return results


@each_route(compresses)
def test_skip_skips_once_on_all_ranks(pool: WorkerPool, case: Case, world: int) -> None:
    ranks = pool.run(fit_skipping, world, case)
    for rank, runs in enumerate(ranks):
        for (bad, journal, clean), (reference, _, _) in zip(runs, ranks[0], strict=True):
            assert bad.stats is not None
            assert (bad.stats.applied_steps, bad.stats.skipped_steps, bad.stats.rounds) == (7, 1, 8)
            journal.assert_untouched()
            assert torch.equal(bad.parameters, reference.parameters)
            assert torch.equal(bad.parameters, clean.parameters) or not case.round_free
            assert len([text for text in bad.warnings if "is skipped on all ranks" in text]) == (rank == 0)


# ---- without one: propagate -----------------------------------------------------------------------------------------


class OwnGuard(Regression):
    """The user throws away gradients that are not finite."""

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not all(p.grad.isfinite().all() for p in self.parameters() if p.grad is not None):
            self.zero_grad()


def fit_propagating(case: Case | None) -> tuple[Fit, Fit, Fit]:
    """Nobody stops it; and a user's own hook drops it, with a run that never had it."""

    def strategy() -> DDPStrategy:
        if case is None:
            return DDPStrategy(**SMALL_BUCKETS)  # type: ignore[arg-type]
        return strategy_of(case, nonfinite="propagate")

    data = batches(8)
    return (
        fit(strategy(), Regression(spoilt=(1, BAD)), data),
        fit(strategy(), OwnGuard(spoilt=(1, BAD)), data),
        fit(strategy(), OwnGuard(), data[:BAD] + data[BAD + 1 :]),
    )


@each_route()
def test_propagate_does_as_ddp_and_leaves_no_trace(pool: WorkerPool, case: Case, world: int) -> None:
    ranks = pool.run(fit_propagating, world, case)
    for spoilt, guarded, clean in ranks:
        assert spoilt.parameters.isnan().all()
        assert spoilt.steps == 8
        assert guarded.parameters.isfinite().all()
        assert torch.equal(guarded.parameters, ranks[0][1].parameters)
        assert torch.equal(guarded.parameters, clean.parameters) or not case.round_free


def test_stock_ddp_propagates(pool: WorkerPool) -> None:
    for spoilt, guarded, clean in pool.run(fit_propagating, 2, None):
        assert spoilt.parameters.isnan().all()
        assert torch.equal(guarded.parameters, clean.parameters)
