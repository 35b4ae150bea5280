"""`CommMonitor`: what it reports is what happened, and looking changes nothing."""

import csv
import importlib
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_commopt import CommOptStrategy
from lightning_commopt.callbacks import CommMonitor, CommSummary, RankTimes
from lightning_commopt.callbacks.monitor.end_table import plain_table
from lightning_commopt.callbacks.monitor.replicas import bits_hash
from lightning_commopt.callbacks.monitor.step_clock import StepClock
from lightning_commopt.routes import ControlGroup
from lightning_commopt.routes.transport import Travelling
from tests.pool import WorkerFailure, WorkerPool, trainer

pytestmark = pytest.mark.runs("callbacks", "CommMonitor")

KEYS = {
    "commopt/samples_per_s",
    "commopt/samples_per_s_per_rank",
    "commopt/step_ms",
    "commopt/compute_ms",
    "commopt/exposed_comm_ms",
    "commopt/waiting_ms",
    "commopt/transfer_ms",
    "commopt/comm_ratio",
    "commopt/waiting_ratio",
    "commopt/overlap_ratio",
    "commopt/scaling_efficiency",
    "commopt/slowest_rank",
    "commopt/sent_mb_per_step",
    "commopt/sent_payload_mb_per_step",
    "commopt/sent_exact_mb_per_step",
    "commopt/sent_header_mb_per_step",
    "commopt/sent_inside_node_mb_per_step",
    "commopt/compression_ratio",
    "commopt/cpu_busy_cores",
}


class Batches(Dataset[Tensor]):
    """Ready batches of the given sizes, over and over."""

    def __init__(self, sizes: tuple[int, ...] = (4,)) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((self.sizes[index % len(self.sizes)], 32), index / 1000)


class Net(LightningModule):
    """A small network.

    Args:
        slow_rank: Rank that sleeps 50 ms a batch.
        slow_hook: Where it sleeps.
        slow_hooks: Seconds that a validation batch takes, and a checkpoint.
        fails_at: Batch that raises.
        failing_rank: Only there; None for all ranks.

    """

    def __init__(
        self,
        slow_rank: int | None = None,
        slow_hook: str = "training_step",
        slow_hooks: float = 0.0,
        fails_at: int | None = None,
        failing_rank: int | None = None,
    ) -> None:
        super().__init__()
        self.slow_rank = slow_rank
        self.slow_hook = slow_hook
        self.slow_hooks = slow_hooks
        self.fails_at = fails_at
        self.failing_rank = failing_rank
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32))

    def sleep(self, hook: str) -> None:
        if self.global_rank == self.slow_rank and hook == self.slow_hook:
            time.sleep(0.05)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == self.fails_at and self.failing_rank in (None, self.global_rank):
            raise ValueError("planted")
        self.sleep("training_step")
        loss: Tensor = self.layers(batch + torch.rand(())).square().mean()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sleep("on_train_batch_end")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        time.sleep(self.slow_hooks)
        self.log("val_loss", self.layers(batch).square().mean(), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        time.sleep(self.slow_hooks)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TwoOptimizers(Net):
    """Steps two optimizers in every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 2:
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.layers[0], self.layers[2])]


def world() -> int:
    """The number of ranks of this run of the pool."""
    return int(os.environ["WORLD_SIZE"])


def fit(
    strategy: str | CommOptStrategy = "ddp",
    *,
    net: Net | None = None,
    sizes: tuple[int, ...] = (4,),
    monitor: CommMonitor | None = None,
    before: list[Callback] | None = None,
    **options: Any,
) -> tuple[Trainer, CommMonitor]:
    """Train with a monitor on this rank."""
    monitor = monitor or CommMonitor()
    defaults: dict[str, Any] = {"max_steps": 12, "use_distributed_sampler": False, "limit_val_batches": 0}
    train, val = (DataLoader(Batches(sizes), batch_size=None) for _ in range(2))
    t = trainer(world(), strategy, callbacks=[*(before or []), monitor], **(defaults | options))
    t.fit(net or Net(), train, val)
    return t, monitor


def summary_of(strategy: str, **arguments: Any) -> Any:
    """Train, and return the `CommSummary` of this rank; each test knows which of its numbers must be there."""
    summary = fit(strategy, **arguments)[1].summary
    assert summary is not None
    return summary


@pytest.mark.parametrize("strategy", ["ddp", "commopt_none", "commopt_bf16", "commopt_int8"])
def test_summary_is_complete_and_the_same_on_all_ranks(pool: WorkerPool, strategy: str) -> None:
    first, second = pool.run(summary_of, 2, strategy, limit_val_batches=1, val_check_interval=6)
    assert first == second
    assert first.method == strategy.removeprefix("commopt_")
    assert (first.world_size, first.steps, first.measured_steps, first.skipped_steps) == (2, 12, 9, 0)
    assert all(value > 0 for value in (first.samples_per_s, first.step_ms, first.compute_ms, first.exposed_comm_ms))
    assert first.waiting_ms >= 0
    assert first.compute_ms + first.exposed_comm_ms + first.waiting_ms == pytest.approx(first.step_ms)
    parameters = sum(p.numel() for p in Net().parameters())
    assert first.dense_mb_per_step == pytest.approx(4 * parameters / 1e6)
    assert first.compression_ratio == pytest.approx(first.dense_mb_per_step / first.sent_mb_per_step)
    at_most = {"ddp": 1, "commopt_none": 1, "commopt_bf16": 2, "commopt_int8": 4}[strategy]
    assert 0.8 * at_most < first.compression_ratio <= at_most
    assert first.validation is not None
    assert first.validation[0] == "val_loss"
    assert first.replicas_equal is True
    table, other = pool.output[0], pool.output[1]
    for words in ("averages over the last 9 of 12 steps", "exposed communication", "val_loss", "replicas equal"):
        assert words in table
        assert words not in other


@pytest.mark.parametrize("strategy", ["ddp", "commopt_none", "commopt_int8"])
@pytest.mark.parametrize(("slow_rank", "slow_hook"), [(1, "training_step"), (0, "on_train_batch_end")])
def test_time_for_a_slow_rank_is_waiting(pool: WorkerPool, strategy: str, slow_rank: int, slow_hook: str) -> None:
    summary = pool.run(summary_of, 2, strategy, net=Net(slow_rank, slow_hook))[0]
    slow, fast = summary.by_rank[slow_rank], summary.by_rank[1 - slow_rank]
    assert slow.compute_ms > fast.compute_ms + 25
    assert fast.waiting_ms > slow.waiting_ms + 25
    assert fast.exposed_comm_ms < 25
    assert summary.slowest_rank == slow_rank
    assert summary.advice.bound_by == "waiting"
    assert f"Rank {slow_rank} computes longest" in summary.advice.sentence


def summary_on_a_slow_link() -> CommSummary | None:
    """Train where messages take 50 ms longer, on all ranks alike."""
    wait = Travelling.wait

    def slow(self: Travelling) -> bool:
        time.sleep(0.05)
        wait(self)
        return True

    Travelling.wait = slow  # type: ignore[method-assign]
    return fit("commopt_int8")[1].summary


def test_time_on_a_slow_link_is_communication(pool: WorkerPool) -> None:
    summary = pool.run(summary_on_a_slow_link, 2)[0]
    assert summary is not None
    assert summary.transfer_ms is not None
    assert summary.transfer_ms > 45
    assert min(rank.exposed_comm_ms for rank in summary.by_rank) > 25
    assert summary.advice.bound_by == "communication"
    assert "`int4` instead of `int8`" in summary.advice.sentence


class SlowBackward(Net):
    """Takes 100 ms between its two buckets."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.layers[0](batch + torch.rand(()))
        hidden.register_hook(lambda gradient: time.sleep(0.1))
        loss: Tensor = self.layers[2](self.layers[1](hidden)).square().mean()
        return loss


def summary_with_hidden_messages() -> CommSummary | None:
    """Train with a bucket that is there long before the next one."""
    return fit(CommOptStrategy("int8", bucket_cap_mb=0.005), net=SlowBackward())[1].summary


def test_what_arrived_long_ago_did_not_travel_so_long(pool: WorkerPool) -> None:
    summary = pool.run(summary_with_hidden_messages, 2)[0]
    assert summary is not None
    assert summary.step_ms is not None
    assert summary.step_ms > 100
    assert summary.transfer_ms is not None
    assert summary.transfer_ms < 60


def test_exact_times_are_complete(pool: WorkerPool) -> None:
    summary = pool.run(summary_of, 2, "commopt_int8", net=Net(1), monitor=CommMonitor(exact=True))[0]
    parts = summary.compute_ms + summary.exposed_comm_ms + summary.waiting_ms
    assert parts == pytest.approx(summary.step_ms)
    assert summary.by_rank[0].waiting_ms > summary.by_rank[1].waiting_ms + 25


def logged(folder: str) -> None:
    """Train with two loggers and two logs."""
    loggers = [CSVLogger(folder, "csv", version=0), TensorBoardLogger(folder, "tensorboard", version=0)]
    fit("commopt_int8", monitor=CommMonitor(every_n_steps=5), logger=loggers)


def test_loggers_get_every_key(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(logged, 2, str(tmp_path))
    rows = list(csv.DictReader((tmp_path / "csv/version_0/metrics.csv").read_text().splitlines()))
    ours = {int(row["step"]): row for row in rows if row["commopt/step_ms"]}
    assert sorted(ours) == [5, 10]
    for row in ours.values():
        assert all(float(row[key]) >= 0 for key in KEYS | {"commopt/compression_error"})
        by_kind = [float(row[f"commopt/sent_{kind}_mb_per_step"]) for kind in ("payload", "exact", "header")]
        assert sum(by_kind) == pytest.approx(float(row["commopt/sent_mb_per_step"]))
        assert float(row["commopt/samples_per_s_per_rank"]) == pytest.approx(float(row["commopt/samples_per_s"]) / 2)
    events = next((tmp_path / "tensorboard/version_0").glob("events.*")).read_bytes()
    assert all(key.encode() in events for key in KEYS)


def gathers(strategy: str) -> list[int]:
    """Train, and return the global step of each exchange between ranks that the monitor made."""
    steps: list[int] = []
    all_gather = ControlGroup.all_gather

    def counted(self: ControlGroup, value: Any) -> list[Any]:
        steps.append(t.global_step)
        return all_gather(self, value)

    monitor = CommMonitor(every_n_steps=5)
    t = trainer(world(), strategy, callbacks=[monitor], max_steps=12)

    class Watch(Callback):
        def on_train_start(self, *args: Any) -> None:
            ControlGroup.all_gather = counted  # type: ignore[method-assign]

    t.callbacks.insert(0, Watch())
    t.fit(Net(), DataLoader(Batches(), batch_size=None))
    return steps


@pytest.mark.parametrize("strategy", ["ddp", "commopt_int8"])
def test_ranks_talk_only_at_the_ends_of_warm_up_intervals_and_fit(pool: WorkerPool, strategy: str) -> None:
    steps = pool.run(gathers, 2, strategy)[0]
    assert sorted(set(steps)) == [0, 3, 5, 10, 12]


def test_samples_are_counted_over_accumulation_and_uneven_batches(pool: WorkerPool) -> None:
    sizes = (1, 2, 3, 4, 5, 6, 7, 8)
    summary = pool.run(summary_of, 2, "ddp", sizes=sizes, accumulate_grad_batches=4, max_steps=7)[0]
    assert (summary.steps, summary.measured_steps) == (7, 4)
    assert summary.samples_per_s * summary.step_ms / 1e3 == pytest.approx(2 * 18)  # two ranks, half of the sizes a step


@pytest.mark.parametrize("strategy", ["ddp", "commopt_int8"])
def test_a_step_is_what_global_step_counts(pool: WorkerPool, strategy: str) -> None:
    summary = pool.run(
        summary_of, 2, strategy, net=TwoOptimizers(), max_steps=-1, max_epochs=1, limit_train_batches=10
    )[0]
    assert (summary.steps, summary.measured_steps) == (10, 6)  # two a pair of batches; warm-up ends within the second
    assert summary.samples_per_s * summary.step_ms / 1e3 == pytest.approx(2 * 4)
    assert summary.sent_mb_per_step > 0


class NonfiniteOnce(Net):
    """Has one batch whose gradients are not finite, on one rank."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        factor = torch.nan if batch_idx == 5 and self.global_rank == 1 else 1.0
        return super().training_step(batch, batch_idx) * factor


def summary_with_skips() -> CommSummary | None:
    """Train with a strategy that skips steps."""
    return fit(CommOptStrategy("int8", nonfinite="skip"), net=NonfiniteOnce())[1].summary


def test_skipped_steps_are_told(pool: WorkerPool) -> None:
    summary = pool.run(summary_with_skips, 2)[0]
    assert summary is not None
    assert (summary.steps, summary.skipped_steps) == (12, 1)
    assert "11 applied, 1 skipped" in pool.output[0]


class Diverge(Callback):
    """Change a parameter on one rank, in a way that an exclusive or of its bits does not show."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Net)
        nn.init.constant_(pl_module.layers[1].get_parameter("weight"), 1.0 + (trainer.global_rank == 1))


def test_a_planted_difference_is_named(pool: WorkerPool) -> None:
    for summary in pool.run(summary_of, 3, "commopt_int8", before=[Diverge()]):
        assert summary.replicas_equal is False
        assert summary.first_difference == ("layers.1.weight", (1,))
    assert "NO" in pool.output[0]
    assert "layers.1.weight" in pool.output[0]


def fit_twice() -> tuple[CommSummary | None, CommSummary | None, set[str]]:
    """Use one monitor for two fits; return both summaries and the methods still wrapped."""
    monitor = CommMonitor(table=False)
    fit("commopt_int8", monitor=monitor, max_steps=6)
    first = monitor.summary
    t, _ = fit("ddp", monitor=monitor, max_steps=8)
    return first, monitor.summary, wrapped_methods(t)


def wrapped_methods(t: Trainer) -> set[str]:
    """Lightning's methods that a monitor still wraps."""
    return {"save_checkpoint", "_broadcast_sigterm_tensor"} & {*vars(t), *vars(t.fit_loop.epoch_loop)}


def test_a_second_fit_starts_anew(pool: WorkerPool) -> None:
    first, second, wrapped = pool.run(fit_twice, 2)[0]
    assert first is not None
    assert second is not None
    assert (first.method, first.steps) == ("int8", 6)
    assert (second.method, second.steps) == ("ddp", 8)
    assert not wrapped
    assert "CommMonitor" not in pool.output[0]


def fit_after_a_failure() -> tuple[bool, set[str], CommSummary | None]:
    """Fail, then fit again with the same monitor; return whether the failed fit had a summary, what stayed wrapped."""
    monitor = CommMonitor()
    t = trainer(world(), "ddp", callbacks=[monitor], max_steps=8)
    with pytest.raises(ValueError, match="planted"):
        t.fit(Net(fails_at=5), DataLoader(Batches(), batch_size=None))
    failed, wrapped = monitor.summary is None, wrapped_methods(t)
    fit("ddp", monitor=monitor, max_steps=6)
    return failed, wrapped, monitor.summary


def test_a_failed_fit_leaves_nothing_behind(pool: WorkerPool) -> None:
    failed, wrapped, summary = pool.run(fit_after_a_failure, 2)[0]
    assert failed
    assert not wrapped
    assert summary is not None
    assert summary.steps == 6


def test_a_rank_that_fails_alone_is_not_held_up(pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailure, match="rank 1: ValueError: planted"):
        pool.run(summary_of, 2, "ddp", net=Net(fails_at=7, failing_rank=1))


@pytest.mark.parametrize("strategy", ["auto", "commopt_int8"])
def test_one_process(pool: WorkerPool, strategy: str) -> None:
    summary = pool.run(summary_of, 1, strategy)[0]
    assert (summary.world_size, summary.method, summary.replicas_equal) == (1, "none", None)
    assert summary.samples_per_s > 0
    assert "one process" in pool.output[0]


def test_fast_dev_run_says_that_nothing_was_measured(pool: WorkerPool) -> None:
    summary = pool.run(summary_of, 2, "commopt_int8", fast_dev_run=True)[0]
    assert (summary.steps, summary.measured_steps, summary.step_ms) == (1, 0, None)
    assert summary.replicas_equal is True
    assert "warm-up" in pool.output[0]


def test_validation_and_checkpoints_are_not_counted(pool: WorkerPool, tmp_path: Path) -> None:
    checkpoints = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_weights_only=True)
    options: dict[str, Any] = {
        "before": [checkpoints],
        "enable_checkpointing": True,
        "limit_val_batches": 1,
        "val_check_interval": 2,
    }
    summary = pool.run(summary_of, 2, "ddp", net=Net(slow_hooks=0.4), max_steps=8, **options)[0]
    assert summary.step_ms < 300  # else 400 and more


def state_after(strategy: str, with_monitor: bool) -> tuple[list[Tensor], Tensor]:
    """Train, and return parameters and the state of the random generator."""
    torch.manual_seed(1)
    net = Net()
    callbacks: list[Callback] = [CommMonitor(every_n_steps=2)] if with_monitor else []
    t = trainer(world(), strategy, callbacks=callbacks, max_steps=8)
    t.fit(net, DataLoader(Batches(), batch_size=None))
    return [p.detach() for p in net.parameters()], torch.get_rng_state()


@pytest.mark.parametrize("strategy", ["ddp", "commopt_int8"])
def test_looking_changes_nothing(pool: WorkerPool, strategy: str) -> None:
    plain, plain_rng = pool.run(state_after, 2, strategy, False)[0]
    watched, watched_rng = pool.run(state_after, 2, strategy, True)[0]
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert torch.equal(plain_rng, watched_rng)


def test_another_strategy_gets_a_warning() -> None:
    other: Any = SimpleNamespace(world_size=2, strategy=object())
    monitor = CommMonitor()
    with pytest.warns(UserWarning, match="cannot measure `object`"):
        monitor.setup(other, LightningModule(), "fit")
    monitor.on_train_start(other, LightningModule())
    monitor.on_train_end(other, LightningModule())
    assert monitor.summary is None


def test_the_source_folder_is_no_package_of_its_own() -> None:
    with pytest.raises(ImportError, match="Import `lightning_commopt.callbacks` instead"):
        importlib.import_module("callbacks")


def test_options_have_bounds() -> None:
    with pytest.raises(ValueError, match="`every_n_steps` must be at least 1 .* got 0"):
        CommMonitor(every_n_steps=0)


def test_clock_leaves_out_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = StepClock()
    clock.resume()
    now = 1.0
    with clock.paused():
        now = 3.0
    with clock.barrier():
        now = 4.0
    clock.add_samples(5)
    first = clock.close_step()
    assert (first.steps, first.seconds, first.barrier_seconds, first.samples) == (1, 2.0, 1.0, 5)
    clock.pause()
    with clock.barrier():  # nobody counts here
        now = 10.0
    clock.resume()
    now = 11.0
    clock.add_samples(None)
    second = clock.close_step(2) - first
    assert (second.steps, second.seconds, second.barrier_seconds, second.samples) == (2, 1.0, 0.0, None)


def test_processor_time_is_counted_with_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"perf_counter": 0.0, "process_time": 0.0}
    for name in now:
        monkeypatch.setattr(time, name, lambda name=name: now[name])
    clock = StepClock()
    clock.resume()
    now |= {"perf_counter": 1.0, "process_time": 1.5}
    with clock.paused():
        now |= {"perf_counter": 3.0, "process_time": 5.0}
    first = clock.close_step()
    assert (first.seconds, first.cpu_seconds) == (1.0, 1.5)
    now |= {"perf_counter": 5.0, "process_time": 6.0}
    second = clock.close_step() - first
    assert (second.seconds, second.cpu_seconds) == (2.0, 1.0)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.uint8, torch.bool]
)
def test_hash_sees_bits_order_and_constants(dtype: torch.dtype) -> None:
    values = (torch.arange(600_000) % 7 // 3).to(dtype)
    same = values.clone()
    assert bits_hash(values) == bits_hash(same.view(-1, 2))
    swapped = values.clone()
    swapped[[2, 3]] = swapped[[3, 2]]
    ones = torch.ones_like(values)
    assert len({bits_hash(t) for t in (values, swapped, ones, torch.zeros_like(values))}) == 4
    assert bits_hash(values[:0]) == 0
    if dtype.is_floating_point:
        nudged = values.clone()
        nudged[-1] += torch.finfo(dtype).eps * 2
        assert bits_hash(nudged) != bits_hash(values)


def test_plain_table() -> None:
    times = (RankTimes(100.0, 80.0, 15.0, 5.0), RankTimes(100.0, 84.0, 12.5, 3.5))
    summary = CommSummary(
        measured_steps=57,
        samples_per_s=82.25,
        step_ms=100.0,
        compute_ms=82.0,
        exposed_comm_ms=13.75,
        waiting_ms=4.25,
        sent_mb_per_step=4.1627,
        dense_mb_per_step=16.322,
        compression_ratio=3.921,
        compression_error=0.0069,
        by_rank=times,
        method="int8",
        world_size=2,
        steps=60,
        skipped_steps=2,
        memory_mb=43.6,
        validation=("val_loss", 2.60171),
        replicas_equal=False,
        first_difference=("layer.weight", (1,)),
    )
    assert plain_table(summary).splitlines() == [
        "CommMonitor: averages over the last 57 of 60 steps",
        "  method                      int8  on 2 ranks",
        "  steps                         60  58 applied, 2 skipped",
        "  throughput                  82.2  samples/s",
        "  step                         100  ms",
        "    compute                   82.0  ms, 82 %; highest on rank 1: 84.0",
        "    exposed communication     13.8  ms, 14 %; highest on rank 0: 15.0",
        "    waiting                   4.25  ms, 4 %; highest on rank 0: 5.00",
        "  sent                        4.16  MB a step and rank; plain DDP 16.3",
        "  compression ratio           3.92  bytes of plain DDP over bytes sent",
        "  compression error        0.00690  |residual| / |input|, worst bucket",
        "  extra memory                43.6  MB a rank",
        "  val_loss                  2.6017  last validation",
        "  replicas equal                NO  `layer.weight` on rank 1 differs from rank 0",
        summary.advice.sentence,
    ]
