"""DeepSpeed ZeRO trains as DDP does, with and without compression."""

import importlib.util

import pytest
import torch
from torch import Tensor

from tests.pool import WorkerPool
from tests.strategies.zero_toy import ZeroFit, distance, plain, zero_fit, zero_strategy

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def ddp(pool: WorkerPool) -> Tensor:
    return pool.run(plain, 2)[0].parameters


def none_and_int8(stage: int) -> list[ZeroFit]:
    return [zero_fit(zero_strategy(stage, method)) for method in ("none", "int8")]


@pytest.mark.parametrize("stage", STAGES)
def test_300_steps_end_where_ddp_ends(pool: WorkerPool, ddp: Tensor, stage: int) -> None:
    by_rank = pool.run(none_and_int8, 2, stage)
    none, int8 = by_rank[0]
    assert distance(none.parameters, ddp) < 1e-5
    assert 0 < distance(int8.parameters, ddp) < 0.01
    for fits in by_rank[1:]:
        for mine, theirs in zip(fits, by_rank[0], strict=True):
            assert torch.equal(mine.parameters, theirs.parameters)
