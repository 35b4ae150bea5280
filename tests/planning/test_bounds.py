"""Where a plan is at its limits: many passes, stages that cannot be equal, memory that nearly suffices."""

import re
from dataclasses import astuple

import pytest

from lightning_commopt.compression import BF16, Uncompressed
from lightning_commopt.planning import Cluster, Layout, Model, Training, plan, remedies
from lightning_commopt.planning.layout_step import _simulated, simulate_layout
from lightning_commopt.planning.work import Work

MODEL = Model.shaped(10**9, layers=8)


@pytest.mark.parametrize(
    "layout",
    [
        Layout("pipeline", 4, stages=4),
        Layout("pipeline", 2, stages=4, tensor=2),
        Layout("zero", 16, shards=16, stage=2),
        Layout("zero", 16, shards=16, stage=3),
        Layout("hsdp", 2, shards=8),
    ],
    ids=str,
)
@pytest.mark.parametrize("straggler", [1.0, 1.3])
def test_very_many_passes_go_on_in_a_straight_line(layout: Layout, straggler: float) -> None:
    cluster = Cluster(16, 8, 80e9, 3e14, inter_rate=3e9, straggler=straggler)
    work = Work(MODEL, Training(4096), cluster, layout, 1, 200)
    method = Uncompressed() if layout.kind == "zero" else BF16()
    assert astuple(simulate_layout(work, method)) == pytest.approx(astuple(_simulated(work, method)), rel=2e-3)


def test_a_pipeline_waits_for_the_stage_with_most_blocks() -> None:
    def step_ms(layers: int) -> float:
        model = Model(10**9, layers, 1024, 16, 1024)
        work = Work(model, Training(64), Cluster(4, 4, 80e9, 3e14), Layout("pipeline", 1, stages=4), 1, 64)
        return simulate_layout(work, None).step_ms

    assert step_ms(5) > 1.4 * step_ms(8), "one of four stages has two of five blocks, not a quarter"


def test_devices_as_large_as_is_advised_suffice() -> None:
    model, training = Model.shaped(70 * 10**9), Training(64)

    def cluster(memory: float) -> Cluster:
        return Cluster(8, 8, memory, 3e14)

    small = cluster(24e9)
    advice = next(iter(remedies(model, training, small, plan(model, training, small))))
    found = re.match(r"devices with (\d+) GB", advice)
    assert found
    assert plan(model, training, cluster(float(found[1]) * 1e9)).feasible
    assert not plan(model, training, cluster((float(found[1]) - 1) * 1e9)).feasible


def test_a_larger_batch_is_told_with_the_devices_that_need_it() -> None:
    model, training, cluster = Model.shaped(70 * 10**9), Training(8), Cluster(8, 8, 24e9, 3e14)
    advice = list(remedies(model, training, cluster, plan(model, training, cluster)))
    assert re.match(r"\d+ devices.* and a global batch of \d+: ", advice[-1])
