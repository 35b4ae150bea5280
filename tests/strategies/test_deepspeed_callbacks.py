"""The package's callbacks under DeepSpeed."""

import importlib.util
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_commopt.callbacks import CommMonitor, CommSummary, DistributedDoctor, Finding, LinearLRScaling
from tests.doctor.toy import answers, found, seed_streams
from tests.pool import WorkerPool
from tests.strategies.toy import Regression, batches
from tests.strategies.zero_toy import Full, ZeroFit, zero_fit, zero_strategy

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
    pytest.mark.runs("commopt_deepspeed", "callbacks"),
]

STEPS = 8


class Rates(Regression):
    """Writes down the rate of each step where torch's optimizer takes it; on rank 1 weights begin elsewhere."""

    def __init__(self) -> None:
        super().__init__(spoilt=(1, 2), factor=1e3)
        self.rates: list[float] = []
        with torch.no_grad():
            self.get_parameter("layers.3.bias")[0] += dist.get_rank()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(lambda own, *_: self.rates.append(own.param_groups[0]["lr"]))
        return optimizer


@dataclass
class Looked:
    """What a rank saw."""

    plain: ZeroFit
    examined: ZeroFit
    findings: list[Finding]
    rates: list[float]
    summary: CommSummary | None


def looked(stage: int) -> Looked:
    """Fit with planted faults, without a doctor and with one, accumulating twice: the same data on both ranks."""

    def fit(*callbacks: pl.Callback) -> tuple[ZeroFit, Rates]:
        seed_streams(dist.get_rank())
        model, full = Rates(), Full()
        scaling = LinearLRScaling(8, warmup_steps=3, batch_size_per_device=8)
        options: dict[str, Any] = {"accumulate_grad_batches": 2, "callbacks": [full, scaling, *callbacks]}
        fitted = zero_fit(zero_strategy(stage, "int8"), model, batches(2 * STEPS, rank=0), **options)
        fitted.parameters = full.parameters
        return fitted, model

    plain, _ = fit()
    doctor = DistributedDoctor(STEPS - 1, reference_steps=2, hash_every_n_steps=2, probe_seconds=0)
    monitor = CommMonitor(every_n_steps=2, table=False)
    examined, model = fit(monitor, doctor)
    return Looked(plain, examined, doctor.findings, model.rates, monitor.summary)


@pytest.fixture(scope="module", params=[1, 3])
def stage(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def ranks(pool: WorkerPool, stage: int) -> list[Looked]:
    return pool.run(looked, 2, stage)


def test_the_engine_steps_with_the_scaled_rate(ranks: list[Looked]) -> None:
    """Batches of 8 on 2 ranks, 2 accumulated, for a base of 8: four times the rate, after three steps of warm-up."""
    for rank in ranks:
        assert rank.rates == pytest.approx([3e-3 * scale for scale in (1, 2, 3, *[4] * (STEPS - 3))])


def test_the_doctor_finds_faults_and_changes_nothing(ranks: list[Looked]) -> None:
    for rank in ranks:
        assert torch.equal(rank.plain.parameters, rank.examined.parameters)
        assert rank.findings == ranks[0].findings
    messages = [(finding.check, finding.rank, finding.message) for finding in found(ranks[0].findings)]
    for check, text in (
        ("data", "rank 1 sees the data of rank 0: batch 0 is the same"),
        ("seeds", "`layers.3.bias` began differently on rank 1 than on rank 0; DeepSpeed replaced it by rank 0's"),
        ("gradients", "times as large as the others'"),
    ):
        assert [rank for name, rank, message in messages if name == check and text in message] == [1], text
    assert {name for name, *_ in messages} == {"data", "seeds", "gradients"}


def test_the_doctor_says_what_is_in_parts(ranks: list[Looked], stage: int) -> None:
    findings = ranks[0].findings
    (same,) = answers(findings, "synchronisation")
    if stage < 3:
        assert same.checked
        assert "gradients are exchanged once in 2 accumulated batches" in same.message
    else:
        assert not same.checked
        assert "parameters are in parts: no two ranks hold the same" in same.message
        assert "in each of 2 accumulated batches" in same.message
    (alone,) = answers(findings, "reference")
    assert not alone.checked
    assert "in parts" in alone.message
    (collectives,) = answers(findings, "collectives")
    assert collectives.checked
    assert "DeepSpeed " in collectives.message
    assert "encoded buckets " in collectives.message


def test_the_monitor_measures_the_exchange(ranks: list[Looked], stage: int) -> None:
    summary, stats = ranks[0].summary, ranks[0].examined.stats
    assert summary is not None
    assert stats is not None
    metrics = summary.metrics()
    assert metrics["commopt/sent_mb_per_step"] == pytest.approx(stats.sent_bytes / STEPS / 1e6)
    assert 3 < metrics["commopt/compression_ratio"] < 4
    assert 0.001 < metrics["commopt/compression_error"] < 0.03
    assert 0 < metrics["commopt/exposed_comm_ms"] < metrics["commopt/step_ms"]
    assert summary.replicas_equal is (True if stage < 3 else None)
