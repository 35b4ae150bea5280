"""Where a plan is at its limits: many passes, stages that cannot be equal, memory that nearly suffices."""

import re
from dataclasses import astuple, replace

import pytest

from lightning_commopt.compression import BF16, Compression, Int8, Uncompressed
from lightning_commopt.planning import Cluster, Layout, Model, Training, memory, plan, remedies
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


def test_memory_of_a_pipeline_is_that_of_the_stage_with_most_blocks() -> None:
    """Five blocks in four stages: one has two fifths of parameters, gradients, moments, casts and residuals."""
    model, training, method = Model(10**9, 5, 1024, 16, 1024), Training(16), Int8()
    whole, stages = Layout("data", 4), Layout("pipeline", 4, stages=4)
    for kept in ("parameters", "gradients", "masters", "optimizer", "buckets", "method"):
        needed, of_copy = (getattr(memory(model, training, layout, 1, 1, method), kept) for layout in (stages, whole))
        assert needed == pytest.approx(0.4 * of_copy, rel=0.03), kept
    measured = replace(training, activation_bytes=1e6)
    assert memory(model, measured, stages, 1, 4, method).activations == pytest.approx(4 * 0.4 * 1e6)


def test_the_stage_with_most_blocks_exchanges_most() -> None:
    model, cluster = Model(10**9, 5, 1024, 16, 1024), Cluster(8, 4, 80e9, 3e14, inter_rate=1e8)
    moved = simulate_layout(Work(model, Training(8), cluster, Layout("pipeline", 2, stages=4), 1, 4), Uncompressed())
    assert moved.gradient_bytes == pytest.approx(0.4 * 4e9, rel=0.01)
    assert moved.step_ms > 4e9 / 1e8 * 1e3, "stages of a node exchange over its border"


@pytest.mark.parametrize(
    ("layout", "method"),
    [
        (Layout("data", 16), Uncompressed()),
        (Layout("data", 16), Int8()),
        (Layout("pipeline", 4, stages=4), BF16()),
        (Layout("pipeline", 1, stages=16), Uncompressed()),
        (Layout("pipeline", 1, stages=2, tensor=8), Uncompressed()),
        (Layout("tensor", 4, tensor=4), Int8()),
        (Layout("hsdp", 2, shards=8), Int8()),
        (Layout("hsdp", 1, shards=16), Uncompressed()),
        (Layout("zero", 16, shards=16, stage=2), Int8()),
        (Layout("zero", 16, shards=16, stage=3), Uncompressed()),
        (Layout("zero", 16, shards=16, stage=3, hpz=8), None),
    ],
    ids=str,
)
def test_what_a_node_sends_depends_on_no_rate_and_no_slow_rank(layout: Layout, method: Compression | None) -> None:
    cluster = Cluster(16, 8, 80e9, 3e14, inter_rate=1e9)

    def node_bytes(cluster: Cluster) -> float:
        return simulate_layout(Work(MODEL, Training(64), cluster, layout, 1, 4), method).node_bytes

    sent = node_bytes(cluster)
    assert sent > 0
    assert node_bytes(replace(cluster, intra_rate=1e6)) == pytest.approx(sent)
    assert node_bytes(replace(cluster, inter_rate=1e12)) == pytest.approx(sent)
    assert node_bytes(replace(cluster, straggler=1.5)) == pytest.approx(sent)


def test_a_node_sends_a_ring_of_gradients() -> None:
    """Two nodes: 2 (N - 1) / N times the gradients, whatever ranks there are inside a node."""
    work = Work(MODEL, Training(64), Cluster(16, 8, 80e9, 3e14, intra_rate=1e6), Layout("data", 16), 1, 4)
    assert simulate_layout(work, Uncompressed()).node_bytes == pytest.approx(2 * 15 / 16 * 4e9, rel=1e-3)


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
