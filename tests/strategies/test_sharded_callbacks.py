"""The package's callbacks under a sharded strategy."""

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_commopt.callbacks import CommMonitor, CommSummary, DistributedDoctor, Finding, LinearLRScaling
from tests.doctor.toy import answers, found, seed_streams
from tests.pool import WorkerPool
from tests.strategies.sharded_toy import ShardedFit, fit_sharded, sharded
from tests.strategies.toy import Regression, batches

pytestmark = pytest.mark.runs("commopt_hsdp", "callbacks")

NODES: dict[str, Any] = {"nodes": 2, "timeout": 60.0}


class Spoil(pl.Callback):
    """Changes a parameter on the last rank at the end."""

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_rank == 3 and args[-1] == 5:
            weight = pl_module.layers[3].weight  # type: ignore[index,union-attr]
            assert isinstance(weight, DTensor)
            with torch.no_grad():
                weight.to_local()[0] += 1


def monitored(spoil: bool) -> tuple[ShardedFit, CommSummary | None]:
    monitor = CommMonitor(every_n_steps=2)
    callbacks: list[pl.Callback] = [*([Spoil()] if spoil else []), monitor]
    strategy = sharded("int8", shard_gather="bf16", shard_scatter="int8")
    return fit_sharded(strategy, Regression(), batches(6), callbacks=callbacks), monitor.summary


def test_the_monitor_measures_the_exchange_between_replicas(pool: WorkerPool) -> None:
    for fit, summary in pool.run(monitored, 4, False, **NODES):
        assert summary is not None
        assert fit.stats is not None
        assert summary.method == "int8"
        assert summary.replicas_equal
        between, inside = fit.stats.sent_bytes - fit.stats.promised.inside_node, fit.stats.promised.inside_node
        assert inside > between > 0
        assert summary.sent_mb_per_step == pytest.approx((inside + between) / 6 / 1e6)
        assert summary.sent_inside_node_mb_per_step == pytest.approx(inside / 6 / 1e6)
        assert summary.compression_ratio == pytest.approx(fit.stats.dense_bytes / between)


def test_the_monitor_compares_equal_shards(pool: WorkerPool) -> None:
    for _, summary in pool.run(monitored, 4, True, **NODES):
        assert summary is not None
        assert summary.replicas_equal is False
        assert summary.first_difference == ("layers.3.weight", (3,))


@dataclass
class Examined:
    """What a rank saw of two fits, the second with a doctor."""

    plain: ShardedFit
    examined: ShardedFit
    rates: list[float]
    findings: list[Finding]


def scaled_and_examined() -> Examined:
    """Fit with planted faults: the same data everywhere, weights and a loss of rank 3's own."""
    rates: list[float] = []

    class Rates(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def fit(*callbacks: pl.Callback) -> ShardedFit:
        seed_streams(dist.get_rank())
        model = Regression(spoilt=(3, 1), factor=1e3)
        with torch.no_grad():
            model.get_parameter("layers.3.bias")[0] += dist.get_rank() == 3
        scaling = LinearLRScaling(base_batch_size=8, warmup_steps=0, batch_size_per_device=8)
        strategy = sharded("int8", shard_gather="int8")
        return fit_sharded(strategy, model, batches(4, rank=0), callbacks=[scaling, *callbacks])

    doctor = DistributedDoctor(3, reference_steps=1, hash_every_n_steps=1, probe_seconds=0)
    return Examined(fit(), fit(doctor, Rates()), rates, doctor.findings)


def test_rates_are_scaled_and_the_doctor_looks(pool: WorkerPool) -> None:
    ranks = pool.run(scaled_and_examined, 4, **NODES)
    for rank in ranks:
        assert rank.rates == pytest.approx([4 * 3e-3] * 4)
        assert torch.equal(rank.plain.parameters, rank.examined.parameters)
        assert rank.findings == ranks[0].findings
    messages = [(finding.check, finding.rank, finding.message) for finding in found(ranks[0].findings)]
    for check, text in (
        ("data", "rank 3 sees the data of rank 0"),
        ("seeds", "`layers.3.bias` began differently on rank 3"),
        ("gradients", "times as large as the others'"),
    ):
        assert [rank for name, rank, message in messages if name == check and text in message] == [3], text
    assert {name for name, *_ in messages} == {"data", "seeds", "gradients", "environment"}  # `lo` between two nodes
    (same,) = answers(ranks[0].findings, "synchronisation")
    assert same.checked
    (alone,) = answers(ranks[0].findings, "reference")
    assert "ranks hold shards of parameters" in alone.message
    (collectives,) = answers(ranks[0].findings, "collectives")
    assert "FSDP2 " in collectives.message


def drifting() -> list[Finding]:
    doctor = DistributedDoctor(6, hash_every_n_steps=1, probe_seconds=0)
    fit_sharded(sharded("int8"), Regression(), batches(6), callbacks=[Spoil(), doctor])
    return answers(doctor.findings, "synchronisation")


def test_the_doctor_finds_a_shard_that_drifts(pool: WorkerPool) -> None:
    (finding,) = pool.run(drifting, 4, **NODES)[1]
    assert (finding.found, finding.rank, finding.number) == (True, 3, 6)
    assert "`layers.3.weight` on rank 3 differs" in finding.message
