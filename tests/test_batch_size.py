"""How many samples a batch holds, and which metric is a validation loss."""

from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from lightning_commopt import CommOptStrategy
from lightning_commopt.callbacks import CommMonitor
from lightning_commopt.callbacks.monitor.batch_size import samples_in
from lightning_commopt.callbacks.monitor.fit_measurement import _validation_loss
from tests.pool import WorkerPool
from tests.strategies.toy import Regression, batches, fit


@dataclass
class Pair:
    """A batch of a kind of its own."""

    x: Tensor
    y: Tensor


X, Y = torch.zeros(6, 3), torch.zeros(6)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (None, 0),
        (X, 6),
        ([X, Y], 6),
        ({"text": ["a long text"] * 6, "x": X, "y": Y}, 6),  # a text does not say how many there are
        (UserDict({"x": X, "more": {"y": Y}}), 6),
        (Pair(X, Y), 6),
        ((np.zeros((6, 2)), Y), 6),
        (["a", "bcd", "ef"], 3),
        ({"a": [1, 2], "b": ["x", "yz"]}, 2),
        (torch.tensor(1.0), 1),
        ([X, Y, torch.tensor(0.5)], 6),
        ([torch.zeros(40, 3), torch.zeros(2, 90), Y], None),  # a graph: nodes, edges, targets
        ("text", None),
        (object(), None),
        ([], None),
    ],
)
def test_samples_of_a_batch(batch: Any, samples: int | None) -> None:
    assert samples_in(batch) == samples


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["value_loss", "loss"], None),
        (["interval_loss"], None),
        (["val_loss", "aux/val_loss"], "val_loss"),
        (["val/loss", "value_loss"], "val/loss"),
        (["loss_val"], "loss_val"),
        (["validation_loss_epoch"], "validation_loss_epoch"),
        (["valid.loss"], "valid.loss"),
    ],
)
def test_a_validation_loss_is_named_so(names: list[str], told: str | None) -> None:
    trainer: Any = SimpleNamespace(callback_metrics={name: torch.tensor(1.0) for name in names})
    assert _validation_loss(trainer) == (None if told is None else (told, 1.0))


class Count(Callback):
    """Reads what a monitor has counted on this rank."""

    def __init__(self, monitor: CommMonitor) -> None:
        self.monitor = monitor
        self.samples: int | None = None

    @override
    def on_train_end(self, *args: Any) -> None:
        assert self.monitor._fit is not None
        self.samples = self.monitor._fit.clock.closed.samples


def counted() -> tuple[int, int | None]:
    """Steps and samples of a rank that ends early, or goes on."""
    monitor = CommMonitor(table=False)
    count = Count(monitor)
    strategy = CommOptStrategy("int8", uneven="join")
    ran = fit(strategy, Regression(), batches(6 + 4 * dist.get_rank()), callbacks=[count, monitor])
    return ran.steps, count.samples


def test_repeated_batches_are_no_samples(pool: WorkerPool) -> None:
    assert pool.run(counted, 2) == [(10, 6 * 8), (10, 10 * 8)]
