"""`CommProfiler`: traces of every rank, and what they say."""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.profilers import PyTorchProfiler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_commopt.callbacks import CommMonitor, CommProfiler, CommSummary, TraceTimes
from lightning_commopt.callbacks.monitor import step_clock
from lightning_commopt.callbacks.monitor.averages import WARM_UP_STEPS
from lightning_commopt.callbacks.profiler.trace import times_of
from tests.pool import WorkerPool, trainer

pytestmark = pytest.mark.runs("callbacks", "CommProfiler")


class Net(LightningModule):
    """Several layers, so that buckets can overlap; one rank may sleep, one batch may fail."""

    def __init__(self, slow_rank: int | None = None, fails_at: int | None = None) -> None:
        super().__init__()
        self.slow_rank, self.fails_at = slow_rank, fails_at
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == self.fails_at:
            raise ValueError("planted")
        if self.global_rank == self.slow_rank:
            time.sleep(0.05)
        loss: Tensor = self.layers(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    strategy: str, profiler: CommProfiler | None, net: Net | None = None, **options: Any
) -> tuple[tuple[TraceTimes, ...], list[Tensor]]:
    """Train on this rank; return what the profiler says, and the parameters at the end."""
    torch.manual_seed(1)
    net = net or Net()
    callbacks = [profiler] if profiler else []
    t = trainer(int(os.environ["WORLD_SIZE"]), strategy, callbacks=callbacks, **({"max_steps": 8} | options))
    t.fit(net, DataLoader(TensorDataset(torch.ones(200, 4, 64)), batch_size=None))
    return profiler.times if profiler else (), [p.detach() for p in net.parameters()]


@pytest.mark.parametrize(("strategy", "world"), [("ddp", 2), ("commopt_int8", 2), ("commopt_int4", 3), ("auto", 1)])
def test_every_rank_writes_a_trace(pool: WorkerPool, tmp_path: Path, strategy: str, world: int) -> None:
    profiler = CommProfiler(start_step=3, steps=2, folder=tmp_path / "new")
    found = [times for times, _ in pool.run(fit, world, strategy, profiler)]
    assert all(times == found[0] for times in found)
    assert len(found[0]) == world
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [f"rank{rank}.json" for rank in range(world)]
    for rank, times in enumerate(found[0]):
        events = json.loads((tmp_path / "new" / f"rank{rank}.json").read_text())["traceEvents"]
        names = [event["name"] for event in events]
        assert sum(name.startswith("ProfilerStep#") for name in names) == 2
        spans = {name.removeprefix("lightning_commopt::") for name in names if name.startswith("lightning_commopt::")}
        assert spans >= ({"encode", "all_gather", "decode"} if "commopt" in strategy else set())
        assert 0 < times.compute_ms < times.step_ms
        assert (times.communication_ms > 0) == (world > 1)
        assert (times.codec_ms > 0) == ("commopt" in strategy)
        assert 0 <= times.overlap_ms <= min(times.compute_ms, times.communication_ms)
    words = ("CommProfiler: ms a step, from traces of 2 steps", "nsys profile", str(tmp_path))
    assert all(word in pool.output[0] for word in words)


@pytest.mark.parametrize("strategy", ["ddp", "commopt_int8"])
def test_waiting_for_a_slow_rank_is_exposed(pool: WorkerPool, tmp_path: Path, strategy: str) -> None:
    profiler = CommProfiler(start_step=3, steps=2, folder=tmp_path)
    fast, slow = pool.run(fit, 2, strategy, profiler, Net(slow_rank=1))[0][0]
    assert fast.exposed_ms > slow.exposed_ms + 25


@pytest.mark.parametrize("strategy", ["ddp", "commopt_int8"])
def test_profiling_changes_nothing(pool: WorkerPool, tmp_path: Path, strategy: str) -> None:
    profilers = (None, CommProfiler(start_step=2, steps=3, folder=tmp_path))
    plain, profiled = (pool.run(fit, 2, strategy, profiler)[0][1] for profiler in profilers)
    assert all(torch.equal(a, b) for a, b in zip(plain, profiled, strict=True))


def monitored(folder: str, order: int) -> CommSummary:
    """A fit in planted time: a batch takes a second, but ten while it is recorded, and so does the end of recording."""
    now = 0.0
    step_clock.time = SimpleNamespace(perf_counter=lambda: now, process_time=lambda: now)  # type: ignore[assignment]
    profiler, monitor = CommProfiler(5, 2, folder), CommMonitor(table=False)

    class Planted(Net):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            nonlocal now
            now += 10.0 if profiler.records else 1.0
            return super().training_step(batch, batch_idx)

    stop = profiler._stop

    def slow_stop() -> None:
        nonlocal now
        now += 10.0 * profiler._running
        stop()

    profiler._stop = slow_stop  # type: ignore[method-assign]
    callbacks = [profiler, monitor][::order]
    t = trainer(2, "commopt_int8", callbacks=callbacks, max_steps=12)
    t.fit(Planted(), DataLoader(TensorDataset(torch.ones(200, 4, 64)), batch_size=None))
    assert monitor.summary is not None
    return monitor.summary


@pytest.mark.parametrize("order", [1, -1], ids=["profiler first", "monitor first"])
def test_the_monitor_leaves_recorded_steps_out(pool: WorkerPool, tmp_path: Path, order: int) -> None:
    left_out = 2 if order == 1 else 3  # the end of recording falls into the next step
    for summary in pool.run(monitored, 2, str(tmp_path), order):
        assert summary.steps == 12
        assert summary.left_out_steps == left_out
        assert summary.measured_steps == 12 - WARM_UP_STEPS - left_out
        assert summary.step_ms == pytest.approx(1000)
        assert summary.sent_mb_per_step is not None
        assert summary.compression_ratio == pytest.approx(summary.dense_mb_per_step / summary.sent_mb_per_step)  # type: ignore[operator]


def steps_in(folder: str, start_step: int, steps: int, **options: Any) -> int:
    """Train in one process; return the recorded batches."""
    profiler = CommProfiler(start_step, steps, folder)
    fit("auto", profiler, **options)
    path = Path(folder) / "rank0.json"
    text = path.read_text() if path.exists() else "ProfilerStep"
    return text.count('"name": "ProfilerStep#')


@pytest.mark.parametrize(("start", "steps", "recorded"), [(6, 5, 2), (8, 1, 0)])
def test_a_fit_that_is_too_short_says_so(
    pool: WorkerPool, tmp_path: Path, start: int, steps: int, recorded: int
) -> None:
    with pytest.raises(Exception, match=f"recorded {recorded} steps: the fit ended at step 8"):
        pool.run(warned, 1, str(tmp_path), start, steps)


def warned(folder: str, start_step: int, steps: int) -> None:
    """Train with warnings as errors."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*recorded")
        steps_in(folder, start_step, steps)


def test_steps_are_optimizer_steps(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(steps_in, 1, str(tmp_path), 2, 3, accumulate_grad_batches=2)[0] == 3


def fit_again_after_a_failure(folder: str) -> int:
    """Fail while recording, then record in a second fit with the same callback."""
    profiler = CommProfiler(2, 2, folder)
    with pytest.raises(ValueError, match="planted"):
        fit("auto", profiler, Net(fails_at=3))
    assert not any(Path(folder).iterdir())
    return len(fit("auto", profiler)[0])


def test_a_failed_fit_stops_the_profiler(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(fit_again_after_a_failure, 1, str(tmp_path))[0] == 1


@pytest.mark.parametrize(
    ("options", "words"), [({"start_step": -1}, "`start_step`.* 0"), ({"steps": 0}, "`steps`.* 1")]
)
def test_options_have_bounds(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CommProfiler(**options)


def test_what_cannot_be_is_an_error() -> None:
    cpu: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")), profiler=None)
    with pytest.raises(ValueError, match="`nvtx=True` needs CUDA"):
        CommProfiler(nvtx=True).setup(cpu, LightningModule(), "fit")
    cpu.profiler = PyTorchProfiler()
    with pytest.raises(ValueError, match="Only one PyTorch profiler"):
        CommProfiler().setup(cpu, LightningModule(), "fit")


def test_nvtx_ranges_lie_within_the_marks_for_nsys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[str] = []

    def called(name: str) -> Any:
        return lambda *args: calls.append(name)

    @contextlib.contextmanager
    def emit() -> Iterator[None]:
        calls.append("ranges")
        yield
        calls.append("no ranges")

    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", emit)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.nvtx, "mark", called("step"))
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, called(name))
    t: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda")), profiler=None, global_step=0)
    profiler = CommProfiler(1, 2, tmp_path, nvtx=True)
    profiler.setup(t, LightningModule(), "fit")
    profiler.on_train_start(t, LightningModule())
    for _ in range(5):
        profiler.on_train_batch_start(t)
        t.global_step += 1
        profiler.on_train_batch_end(t)
    profiler.on_train_end(t, LightningModule())
    assert calls == ["start", "ranges", "step", "no ranges", "stop"]
    assert not any(tmp_path.iterdir())


def event(name: str, start: float, end: float, thread: int = 1, kind: str = "cpu_op") -> dict[str, Any]:
    """An event of a trace, in ms."""
    return {"ph": "X", "name": name, "cat": kind, "ts": 1e3 * start, "dur": 1e3 * (end - start), "tid": thread}


def test_times_on_the_cpu() -> None:
    events = [
        event("ProfilerStep#0", 0, 10, kind="user_annotation"),
        event("ProfilerStep#1", 10, 20, kind="user_annotation"),
        event("aten::mm", 1, 6),
        event("aten::inner", 2, 3),  # within mm
        event("c10d::allreduce_", 6, 9),  # no compute
        event("lightning_commopt::encode", 3, 4, thread=2, kind="user_annotation"),
        event("aten::round", 3, 4, thread=2),
        event("lightning_commopt::collective", 4, 8, thread=2, kind="user_annotation"),
        event("gloo:all_reduce", 7, 9, thread=3, kind="user_annotation"),
        event("lightning_commopt::decode", 9, 10, thread=2, kind="user_annotation"),
        event("aten::add_", 12, 13),
    ]
    assert times_of(events, 2, cuda=False) == TraceTimes(10, 3, 2.5, 1, 1)


def test_times_on_a_gpu() -> None:
    kernel, ours = "kernel", "gpu_user_annotation"
    events = [
        event("ProfilerStep#0", 0, 10, kind="user_annotation"),
        event("aten::mm", 0, 9),  # the host launches
        event("gemm", 1, 6, 7, kernel),
        event("lightning_commopt::encode", 2, 3, 9, ours),
        event("quantise", 2, 3, 9, kernel),
        event("ncclDevKernel_AllGather", 4, 8, 9, kernel),
    ]
    assert times_of(events, 1, cuda=True) == TraceTimes(10, 5, 4, 2, 1)
