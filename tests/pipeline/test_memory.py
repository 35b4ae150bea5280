"""Stages keep a limit on memory, and a pipeline that nobody needs is told."""

import pytest
import torch

from lightning_commopt.pipeline import gpipe, one_f_one_b, schedule_named
from lightning_commopt.pipeline.memory import (
    BlockMemory,
    block_memory,
    data_parallel_advice,
    held_microbatches,
    stage_bytes,
    within,
)
from lightning_commopt.pipeline.plan import choose_cuts
from lightning_commopt.pipeline.trace import BlockTrace, Shape, Trace

torch_float = Shape((10,), torch.float32, requires_grad=True)


def test_microbatches_held() -> None:
    assert held_microbatches(gpipe(3, 8)) == (8, 8, 8)
    assert held_microbatches(one_f_one_b(3, 8)) == (3, 2, 1)
    assert len(held_microbatches(schedule_named("zbv", 2, 8))) == 4


def test_state_of_a_block() -> None:
    """One that trains has a gradient and two moments; what a block uses from outside counts, too."""
    frozen = torch_float._replace(requires_grad=False)
    shapes = {"blocks.0.weight": torch_float, "head": torch_float, "blocks.1.weight": frozen}
    blocks = [BlockTrace(activation_bytes=7), BlockTrace(used={"head", "blocks.1.weight"})]
    found = block_memory(Trace(blocks), shapes, {"blocks.0.weight": 0, "blocks.1.weight": 1})
    assert found == [BlockMemory(160, 7), BlockMemory(160 + 40, 0)]
    assert stage_bytes(found, 3) == 360 + 21


def test_cuts_by_work_and_memory() -> None:
    """Equal work cuts in the middle; the first stage holds more microbatches, and has no room for so many blocks."""
    trace, names = Trace([BlockTrace() for _ in range(6)]), [str(i) for i in range(6)]
    fits = within(10.0, one_f_one_b(2, 8), [BlockMemory(1, 2)] * 6)  # 5 a block on the first stage, 3 on the last
    for costs in ([1.0] * 6, [0.1, 0.1, 0.1, 1.0, 1.0, 1.0]):
        assert choose_cuts(trace, names[:5], 2, None, costs[:5], fits).cuts == (2,)
    assert choose_cuts(trace, names[:5], 2, None, [0.1, 0.1, 0.1, 0.1, 1.0]).cuts == (4,)
    with pytest.raises(ValueError, match="keep every part in its limit"):
        choose_cuts(trace, names, 2, None, [1.0] * 6, fits)


@pytest.mark.parametrize(
    ("needed", "memory", "copies", "text"),
    [
        (7.9e9, 10_000_000_000, 1, "about 7.9 GB of the 10.0 GB of one device: data parallel"),
        (3.9e9, 10_000_000_000, 2, "of this machine, for each of 2 processes: data parallel"),
        (8.1e9, 10_000_000_000, 1, ""),
        (4.1e9, 10_000_000_000, 2, ""),
        (1.0, None, 1, ""),
    ],
)
def test_data_parallel_is_faster_where_the_model_fits(needed: float, memory: int, copies: int, text: str) -> None:
    advice = data_parallel_advice(needed, memory, copies)
    assert text in advice
    assert bool(text) == bool(advice)
