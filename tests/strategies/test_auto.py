"""`auto`: what it decides on links that are fast, slow, or only seem so, and how decisions outlive a run."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from typing_extensions import override

from lightning_commopt import AutoPolicy, CommOptStrategy
from lightning_commopt.measure import CpuClock
from lightning_commopt.routes import GlooTransport
from lightning_commopt.routes.transport import Travelling
from lightning_commopt.strategies import auto
from lightning_commopt.tuning import (
    Choice,
    Decision,
    choosing,
    largest_state_bytes,
    link_probe,
    memory,
    memory_advice,
    state,
)
from lightning_commopt.tuning.bandwidth import BandwidthWatch
from tests.pool import WorkerPool
from tests.strategies.toy import SMALL_BUCKETS, Batch, Fit, Regression, batches, fit

pytestmark = pytest.mark.runs("commopt", "auto")

BYTES_PER_SECOND = 2e5
INSIDE_NODES: list[list[int]] = []
"""Ranks between which messages take no time."""
STEPS = 30
LENIENT = AutoPolicy(error_budget=0.9)


class PlantedTime:
    """Time that this process spent computing, and that it pretends to have spent on the wire.

    Nobody really waits, and what else the machine does delays nothing.
    """

    def __init__(self) -> None:
        self.on_the_wire_s = 0.0
        self._lock = threading.Lock()

    def transfer(self, nbytes: float) -> None:
        """So many bytes travel."""
        with self._lock:
            self.on_the_wire_s += nbytes / BYTES_PER_SECOND

    def now(self) -> float:
        """Seconds."""
        return time.process_time() + self.on_the_wire_s


PLANTED = PlantedTime()


def plant_time() -> None:
    """Let steps, exchanges and the probe of the links be measured in planted time."""
    CpuClock.mark = lambda self: PLANTED.now()  # type: ignore[method-assign]
    link_probe.time = SimpleNamespace(perf_counter=PLANTED.now)  # type: ignore[assignment]


def plant_slow_messages() -> None:
    """Let our own messages, and the probe's all-reduce, take as long as on a slow link."""
    plant_time()
    exchange, all_reduce = GlooTransport._exchange, link_probe._all_reduce

    def slow_exchange(self: GlooTransport, send: Sequence[Tensor], receive: Tensor) -> Travelling:
        travelling = exchange(self, send, receive)
        if dist.get_process_group_ranks(self.group) not in INSIDE_NODES:
            PLANTED.transfer(send[0].nbytes * (self.world - 1))
        return travelling

    def slow_all_reduce(*args: Any) -> link_probe._Way:
        way = all_reduce(*args)

        def run(nbytes: int) -> None:
            way.run(nbytes)
            PLANTED.transfer(way.sent(nbytes))

        return link_probe._Way(run, way.sent, way.hops)

    GlooTransport._exchange = slow_exchange  # type: ignore[method-assign]
    link_probe._all_reduce = slow_all_reduce  # type: ignore[assignment]


def plant_slow_reducer() -> None:
    """Let a step under DDP's own reducer take as long as on a slow link."""
    ended = auto.Auto.backward_ended

    def slow_backward_ended(self: auto.Auto) -> None:
        if self._strategy._path is None:
            world = self._strategy.world_size
            assert self._strategy.model is not None
            nbytes = 4 * sum(p.numel() for p in self._strategy.model.parameters())
            PLANTED.transfer(2 * (world - 1) / world * nbytes)
        ended(self)

    auto.Auto.backward_ended = slow_backward_ended  # type: ignore[method-assign]


def plant_dense_bucket() -> None:
    """Let the first bucket count as hidden, however long steps take."""
    choosing.dense_buckets = lambda evidence, choice, before=0: 1
    state._FAR_OFF = 1e9


def plant_nodes() -> None:
    """Let messages be slow only between nodes of two ranks."""
    INSIDE_NODES.extend([[0, 1], [2, 3]])


def plant_unseen_bandwidth() -> None:
    """Let no change of the bandwidth be noticed."""
    BandwidthWatch.moved = lambda self, stats: False  # type: ignore[method-assign]


class FastLater(pl.Callback):
    """Lets what was planted take no more time from some batch on."""

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        global BYTES_PER_SECOND
        if batch_idx == 18:
            BYTES_PER_SECOND = 1e15


@dataclass
class Ran:
    """What a rank saw of a fit under `auto`."""

    fit: Fit
    decisions: tuple[Decision, ...]

    @property
    def methods(self) -> list[str]:
        """Words of what was decided, in order."""
        return [decision.choice.method for decision in self.decisions]


def run_auto(
    policy: AutoPolicy,
    plants: Sequence[Callable[[], None]] = (),
    model: Callable[[], Regression] = Regression,
    ckpt_path: Path | None = None,
    steps: int = STEPS,
    **options: Any,
) -> Ran:
    """Fit under `auto`."""
    for plant in plants:
        plant()
    strategy = CommOptStrategy(policy, **options.pop("strategy", SMALL_BUCKETS))
    ran = fit(strategy, model(), batches(steps), ckpt_path, **options)
    assert strategy._auto is not None
    assert strategy._auto.tuner is not None
    reasons = [decision.reason for decision in strategy._auto.tuner.state.decisions]
    assert [line.split(" exchanges: ", 1)[1] for line in strategy.decisions] == reasons
    return Ran(ran, strategy._auto.tuner.state.decisions)


def assert_alike(ranks: Sequence[Ran]) -> None:
    """All ranks took the same decisions and have the same parameters."""
    for ran in ranks:
        assert ran.decisions == ranks[0].decisions
        assert torch.equal(ran.fit.parameters, ranks[0].fit.parameters)
        assert not ran.fit.warnings


def run_dense(model: Callable[[], Regression] = Regression) -> Fit:
    return fit(DDPStrategy(**SMALL_BUCKETS), model(), batches(STEPS))  # type: ignore[arg-type]


# ---- fast links -----------------------------------------------------------------------------------------------------


class Straggling(Regression):
    """Rank 1 takes its time in each step."""

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self.global_rank == 1:
            time.sleep(0.03)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("model", [Regression, Straggling])
def test_nothing_is_chosen_where_nothing_is_to_be_won(pool: WorkerPool, model: type[Regression]) -> None:
    ranks = pool.run(run_auto, 3, AutoPolicy(), (), model)
    assert_alike(ranks)
    for ran, dense in zip(ranks, pool.run(run_dense, 3), strict=True):
        assert ran.methods == ["none"]
        assert "nothing to win" in ran.fit.explain
        assert torch.equal(ran.fit.parameters, dense.parameters)
        assert not ran.fit.hook


# ---- slow links -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3])
def test_a_slow_link_gets_a_method(pool: WorkerPool, world: int) -> None:
    ranks = pool.run(run_auto, world, LENIENT, (plant_slow_messages, plant_slow_reducer))
    assert_alike(ranks)
    assert ranks[0].methods[-1] in ("int8", "int4")
    assert ranks[0].decisions[-1].step <= 12
    for ran in ranks:
        stats = ran.fit.stats
        assert stats is not None
        assert stats.rounds == STEPS
        assert stats.method == ranks[0].methods[-1]
        assert stats.promised.total == stats.sent_bytes
        assert "predicted" in ran.fit.explain
        assert "measured" in ran.fit.explain
        assert "from the first step" not in ran.fit.explain
    assert pool.output[0].count("predicted") >= 2
    assert "commopt auto" not in pool.output[1]


def test_between_nodes(pool: WorkerPool) -> None:
    plants = (plant_slow_messages, plant_slow_reducer, plant_nodes, plant_dense_bucket)
    ranks = pool.run(run_auto, 4, LENIENT, plants, strategy={**SMALL_BUCKETS, "hierarchy": 2})
    assert_alike(ranks)
    assert ranks[0].methods[-1] in ("int8", "int4")
    assert "Mbit/s between nodes" in ranks[0].decisions[-1].reason
    for ran in ranks:
        stats = ran.fit.stats
        assert stats is not None
        assert stats.promised.total == stats.sent_bytes
        assert stats.promised.inside_node > 0
        assert "hierarchical: full precision inside 2 nodes of 2 ranks" in ran.fit.explain
        assert "the first 1 of 3 buckets stay dense" in ran.fit.explain


def test_hidden_buckets_stay_dense(pool: WorkerPool) -> None:
    ranks = pool.run(run_auto, 2, LENIENT, (plant_slow_messages, plant_slow_reducer, plant_dense_bucket))
    assert_alike(ranks)
    assert ranks[0].decisions[-1].choice.dense_buckets == 1
    stats = ranks[0].fit.stats
    assert stats is not None
    assert stats.promised.total == stats.sent_bytes
    assert "the first 1 of 3 buckets stay dense" in ranks[0].fit.explain


def test_a_choice_that_lost_is_taken_back(pool: WorkerPool) -> None:
    ranks = pool.run(run_auto, 2, LENIENT, (plant_slow_messages,))
    assert_alike(ranks)
    assert ranks[0].methods[-1] == "none"
    assert "taken back" in ranks[0].decisions[-1].reason
    for ran in ranks:
        assert not ran.fit.hook
        assert ran.fit.stats is not None
        assert ran.fit.stats.rounds == STEPS


def test_an_error_beyond_the_budget_steps_back(pool: WorkerPool) -> None:
    strict = AutoPolicy(error_budget=1e-4)
    ranks = pool.run(run_auto, 2, strict, (plant_slow_messages, plant_slow_reducer))
    assert_alike(ranks)
    assert ranks[0].methods[-1] == "bf16"
    assert "beyond the budget of 0.00: back to bf16" in ranks[0].decisions[-1].reason


def test_it_looks_again_at_intervals(pool: WorkerPool) -> None:
    policy = AutoPolicy(error_budget=0.9, check_every=5, redecide_every=15)
    plants = (plant_slow_messages, plant_slow_reducer, plant_unseen_bandwidth)
    ranks = pool.run(run_auto, 2, policy, plants, steps=40, callbacks=[FastLater()])
    assert_alike(ranks)
    assert ranks[0].methods[-1] == "none"
    assert "looked again after" in ranks[0].decisions[-1].reason
    assert all(ran.fit.stats is not None and ran.fit.stats.rounds == 40 for ran in ranks)


def test_means_are_compared_now_and_then(pool: WorkerPool) -> None:
    often = AutoPolicy(error_budget=0.9, cosine_every=5, check_every=5)
    ranks = pool.run(run_auto, 2, often, (plant_slow_messages, plant_slow_reducer))
    assert_alike(ranks)
    stats = ranks[0].fit.stats
    assert stats is not None
    assert stats.promised.total == stats.sent_bytes
    assert ranks[0].methods[-1] in ("int8", "int4")


# ---- a checkpoint keeps decisions -----------------------------------------------------------------------------------


class SaveFirst(pl.Callback):
    """Saves at the end of the first epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


PLANTS = (plant_slow_messages, plant_slow_reducer)


def run_and_save(path: Path, policy: AutoPolicy, plants: Sequence[Callable[[], None]]) -> Ran:
    return run_auto(policy, plants, steps=9, max_epochs=2, callbacks=[SaveFirst(path)])


def resume_with_log(
    path: Path, policy: AutoPolicy, plants: Sequence[Callable[[], None]], log: tuple[Decision, ...]
) -> Ran:
    """Go on, with the decisions that the run that never stopped took."""
    checkpoint = torch.load(path, weights_only=True)
    checkpoint[auto.KEY]["tuner"]["decisions"] = [decision.to_dict() for decision in log]
    mine = path.with_suffix(f".{dist.get_rank()}")
    torch.save(checkpoint, mine)
    return run_auto(policy, plants, ckpt_path=mine, steps=9, max_epochs=2)


@pytest.mark.parametrize(
    ("world", "budget", "plants"),
    [
        pytest.param(2, 0.9, PLANTS, id="2-decided before"),
        pytest.param(3, 0.9, (*PLANTS, plant_dense_bucket), id="3-decided before, one bucket dense"),
        pytest.param(2, 1e-4, PLANTS, id="2-steps back after"),
        pytest.param(3, 1e-4, PLANTS, id="3-steps back after"),
    ],
)
def test_resume_is_exact_given_the_log(
    pool: WorkerPool, tmp_path: Path, world: int, budget: float, plants: Sequence[Callable[[], None]]
) -> None:
    policy = AutoPolicy(error_budget=budget)
    whole = pool.run(run_and_save, world, tmp_path / "first.ckpt", policy, plants)
    assert_alike(whole)
    late = [decision for decision in whole[0].decisions if decision.step > 9]
    assert bool(late) == (budget < 0.9)
    resumed = pool.run(resume_with_log, world, tmp_path / "first.ckpt", policy, plants, whole[0].decisions)
    for one, other in zip(whole, resumed, strict=True):
        assert other.decisions == one.decisions
        assert torch.equal(other.fit.parameters, one.fit.parameters)
    assert any(decision.choice.dense_buckets for decision in whole[0].decisions) == (plant_dense_bucket in plants)


def save_int8(path: Path) -> None:
    fit(CommOptStrategy("int8", **SMALL_BUCKETS), Regression(), batches(3), callbacks=[SaveFirst(path)])  # type: ignore[arg-type]


def resume_int8(path: Path) -> list[str]:
    """What is said where `auto` meets residuals."""
    strategy = CommOptStrategy(**SMALL_BUCKETS)  # type: ignore[arg-type]
    return fit(strategy, Regression(), batches(3), path, max_epochs=2).warnings


def test_auto_says_why_it_drops_residuals(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(save_int8, 2, tmp_path / "int8.ckpt")
    first, second = pool.run(resume_int8, 2, tmp_path / "int8.ckpt")
    assert len(first) == 1
    assert "are dropped: `auto` begins with dense steps, which keep none; to keep them, go on with" in first[0]
    assert not second


def resume_blocked(path: Path) -> tuple[list[str], list[str], bool]:
    """What is said where decisions meet an option that forbids any, the methods of that fit, and what is kept."""
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint[auto.KEY]["in_force"]["method"] != "none"
    strategy, methods = CommOptStrategy(static_graph=True), []

    class Methods(pl.Callback):
        @override
        def on_train_batch_start(self, *args: Any) -> None:
            methods.append(strategy.compression.name)

    said = fit(strategy, Regression(), batches(2), path, max_epochs=2, callbacks=[Methods()]).warnings
    assert strategy._auto is not None
    return said, methods, strategy._auto._saved is None


def test_decisions_of_a_checkpoint_are_not_taken_where_none_can_be(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(run_and_save, 2, tmp_path / "auto.ckpt", LENIENT, PLANTS)
    first, second = pool.run(resume_blocked, 2, tmp_path / "auto.ckpt")
    texts = "What `auto` had decided in the checkpoint is not taken: `static_graph`", "auto cannot choose a method"
    assert all(any(text in said for said in first[0]) for text in texts)
    assert not second[0]
    for _, methods, forgotten in (first, second):
        assert methods == ["none"] * 2
        assert forgotten


# ---- options and memory ---------------------------------------------------------------------------------------------


def test_policies_are_options() -> None:
    strategy = CommOptStrategy(AutoPolicy(harshest="bf16"))
    assert strategy._is_auto
    assert strategy._policy == AutoPolicy(harshest="bf16")
    assert CommOptStrategy()._policy == AutoPolicy()
    assert CommOptStrategy("int8")._policy is None


def blocked(options: dict[str, Any]) -> str:
    return fit(CommOptStrategy(**options), Regression(), batches(3)).explain


def test_what_forbids_a_choice_is_said(pool: WorkerPool) -> None:
    for line in pool.run(blocked, 2, {"static_graph": True}):
        assert "auto cannot choose a method: `static_graph` cannot be combined" in line


def test_tight_memory_is_told() -> None:
    model = Regression("adamw")
    nbytes = sum(p.nbytes for p in model.parameters())
    optimizers = [model.configure_optimizers()]
    assert memory_advice(model, optimizers, 4 * nbytes, 2).startswith("Parameters, gradients, optimizer state")
    assert "(100%)" in memory_advice(model, optimizers, 4 * nbytes, 2)
    assert "hybrid sharding" in memory_advice(model, optimizers, 4 * nbytes, 2)
    assert memory_advice(model, optimizers, 6 * nbytes, 2) == ""
    assert memory_advice(model, [torch.optim.SGD(model.parameters(), 0.1)], 4 * nbytes, 2) == ""
    assert memory_advice(model, optimizers, 6 * nbytes, 2, residual_bytes=nbytes) != ""
    assert memory_advice(model, optimizers, None, 2) == ""


def fit_on_small_device(nbytes: int) -> list[str]:
    memory.device_bytes = lambda device: nbytes
    return fit(CommOptStrategy(), Regression("adamw"), batches(3)).warnings


def test_residuals_count_when_a_fit_begins(pool: WorkerPool) -> None:
    """Four times the parameters, and residuals of nearly as much as them, against 80 % of the device."""
    nbytes = sum(p.nbytes for p in Regression().parameters())
    told = [pool.run(fit_on_small_device, 2, int(times * nbytes)) for times in (5.9, 6.3)]
    assert [sum("residuals take" in text for text in ranks[0]) for ranks in told] == [1, 0]


def test_the_largest_state_counts() -> None:
    shapes, numel = [(64, 64), (64,), (2, 2)], 64 * 64
    state = partial(largest_state_bytes, shapes)
    assert state(("bf16",), 2) == state((), 2) == 0
    assert state(("bf16", "int8", "int4"), 2) == 4 * numel
    assert state(("int4",), 2, shadow=True) == 2 * 4 * numel
    assert state(("int4",), 4) == 4 * numel + 4 * numel // 4
    assert state(("int4",), 2, 2) == 4 * numel // 2


def test_choices_are_plain_values() -> None:
    decision = Decision(4, Choice("int8", 1.0, 2), "why", 1.0, 2.0, (("none", None, 2.0), ("int8", 1.0, 1.0)))
    assert Decision.from_dict(decision.to_dict()) == decision
