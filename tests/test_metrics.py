"""Metrics for people who log by hand: over ranks they are those of all ranks."""

from typing import Any

import pytest
import torch.distributed as dist

from lightning_commopt.metrics import CommRatio, ScalingEfficiency, Throughput
from tests.pool import WorkerPool


def measured() -> tuple[float, float, float]:
    """Update with numbers that differ by rank, and compute over ranks."""
    rank = dist.get_rank()
    ratio, efficiency, rate = CommRatio(), ScalingEfficiency(), Throughput()
    for _ in range(2):
        ratio.update(exposed_ms=10.0 + 20 * rank, step_ms=100.0)
        efficiency.update(compute_ms=90.0 - 20 * rank, step_ms=100.0)
        rate.update(samples=10 + 20 * rank, seconds=0.5)
    return ratio.compute().item(), efficiency.compute().item(), rate.compute().item()


def test_over_ranks(pool: WorkerPool) -> None:
    assert pool.run(measured, 2) == [pytest.approx((0.2, 0.8, 80.0))] * 2


@pytest.mark.parametrize(
    ("metric", "values"),
    [
        (CommRatio, {"exposed_ms": 11.0, "step_ms": 10.0}),
        (ScalingEfficiency, {"compute_ms": -1.0, "step_ms": 10.0}),
        (Throughput, {"samples": -1, "seconds": 1.0}),
    ],
)
def test_impossible_numbers_are_refused(metric: Any, values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="`"):
        metric().update(**values)
