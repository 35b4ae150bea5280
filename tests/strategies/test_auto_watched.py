"""What looks at a fit while `auto` changes its method."""

from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_commopt import AutoPolicy, CommOptStrategy
from lightning_commopt.callbacks import CommMonitor, CommSummary
from lightning_commopt.callbacks.report import ReportContent, recording
from tests.pool import WorkerPool
from tests.strategies.test_auto import plant_slow_messages, plant_slow_reducer
from tests.strategies.toy import SMALL_BUCKETS, Batch, Regression, ScaledFP32, batches, fit

pytestmark = pytest.mark.runs("commopt", "auto")


class Watch(pl.Callback):
    """Notes what the monitor calls the method, batch by batch."""

    def __init__(self, monitor: CommMonitor) -> None:
        self.monitor = monitor
        self.methods: list[str] = []

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        assert self.monitor._fit is not None
        self.methods.append(self.monitor._fit.source.method)


class Watched(NamedTuple):
    """What the monitor saw on one rank."""

    methods: list[str]
    summary: CommSummary
    content: ReportContent | None


def watched(path: Path) -> Watched:
    """Fit on a slow link."""
    plant_slow_messages()
    plant_slow_reducer()
    contents: list[ReportContent] = []
    recording.write = lambda path, content: contents.append(content)
    monitor = CommMonitor(every_n_steps=100, table=False, report=path)
    watch = Watch(monitor)
    strategy = CommOptStrategy(AutoPolicy(error_budget=0.9), **SMALL_BUCKETS)  # type: ignore[arg-type]
    fit(strategy, Regression(), batches(24), callbacks=[watch, monitor])
    assert monitor.summary is not None
    return Watched(watch.methods, monitor.summary, contents[0] if contents else None)


def test_the_monitor_tells_of_the_last_method(pool: WorkerPool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ranks = pool.run(watched, 2, tmp_path / "report.html")
    for methods, summary, _ in ranks:
        last = methods[-1]
        assert methods[0] == "none"
        assert last in ("int8", "int4")
        assert summary.method == last
        steps_before = len(methods) - methods[::-1].index(next(m for m in methods[::-1] if m != last))
        assert summary.measured_steps == len(methods) - steps_before - 3
        assert (summary.compression_ratio or 0) > 3
        assert not any(f"instead of `{m}`" in summary.advice.advice for m in ("none", "bf16"))
        assert f"`{last}` instead" not in summary.advice.advice
    content = ranks[0].content
    assert content is not None
    assert sum(group.sent_mb for group in content.groups) == pytest.approx(ranks[0].summary.sent_mb_per_step)
    assert content.recorded is not None
    assert content.recorded.first_step > ranks[0].summary.steps - ranks[0].summary.measured_steps - 3
    assert {span.phase for span in content.recorded.ranks[0]} >= {"encode", "decode", "forward", "backward"}


class Overflows(Regression):
    """The gradients of two batches are not finite."""

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (torch.inf if batch_idx in (3, 7) else 1.0)


def overflowing(compression: str) -> tuple[int | None, bool]:
    """Skipped steps as the monitor tells them, and whether the scaler has its own method back."""
    scaling = ScaledFP32(4.0)
    monitor = CommMonitor(table=False)
    if compression == "auto":
        plant_slow_messages()
        plant_slow_reducer()
    policy: Any = AutoPolicy(error_budget=0.9) if compression == "auto" else compression
    strategy = CommOptStrategy(policy, **SMALL_BUCKETS)  # type: ignore[arg-type]
    fit(strategy, Overflows(), batches(12), callbacks=[monitor], plugins=[scaling])
    assert monitor.summary is not None
    assert scaling.scaler is not None
    own = getattr(scaling.scaler.update, "__func__", None) is torch.amp.GradScaler.update
    return monitor.summary.skipped_steps, own


@pytest.mark.parametrize(("compression", "skipped"), [("none", None), ("auto", None), ("int8", 2)])
def test_skipped_steps_are_counted_or_unknown(pool: WorkerPool, compression: str, skipped: int | None) -> None:
    assert pool.run(overflowing, 2, compression) == [(skipped, True)] * 2


def propagated() -> tuple[str, str]:
    """What is in force about gradients that are not finite, where the user has said it."""
    plant_slow_messages()
    plant_slow_reducer()
    strategy = CommOptStrategy(AutoPolicy(error_budget=0.9), nonfinite="propagate", **SMALL_BUCKETS)  # type: ignore[arg-type]
    fit(strategy, Regression(), batches(12))
    return strategy.compression.name, strategy.nonfinite


def test_a_wish_to_propagate_is_honoured(pool: WorkerPool) -> None:
    for method, nonfinite in pool.run(propagated, 2):
        assert method in ("int8", "int4")
        assert nonfinite == "propagate"
