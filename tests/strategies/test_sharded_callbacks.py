"""The package's callbacks under a sharded strategy."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_commopt.callbacks import CommMonitor, CommSummary, DistributedDoctor, LinearLRScaling
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
    return fit_sharded(sharded("int8"), Regression(), batches(6), callbacks=callbacks), monitor.summary


def test_the_monitor_measures_the_exchange_between_replicas(pool: WorkerPool) -> None:
    for fit, summary in pool.run(monitored, 4, False, **NODES):
        assert summary is not None
        assert fit.stats is not None
        assert summary.method == "int8"
        assert summary.replicas_equal
        assert summary.sent_mb_per_step == pytest.approx(fit.stats.sent_bytes / 6 / 1e6)


def test_the_monitor_compares_equal_shards(pool: WorkerPool) -> None:
    for _, summary in pool.run(monitored, 4, True, **NODES):
        assert summary is not None
        assert summary.replicas_equal is False
        assert summary.first_difference == ("layers.3.weight", (3,))


def scaled_and_examined() -> tuple[ShardedFit, list[float], int]:
    rates: list[float] = []

    class Rates(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    doctor = DistributedDoctor()
    scaling = LinearLRScaling(base_batch_size=8, warmup_steps=0, batch_size_per_device=8)
    callbacks = [scaling, doctor, Rates()]
    return fit_sharded(sharded("int8"), Regression(), batches(3), callbacks=callbacks), rates, len(doctor.findings)


def test_rates_are_scaled_and_the_doctor_says_that_it_does_not_look(pool: WorkerPool) -> None:
    ranks = pool.run(scaled_and_examined, 4, **NODES)
    for _, rates, findings in ranks:
        assert rates == pytest.approx([4 * 3e-3] * 3)
        assert findings == 0
    assert any("`DistributedDoctor` does not know `CommOptShardedStrategy`" in text for text in ranks[0][0].warnings)
