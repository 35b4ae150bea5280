"""The simulation: laws of its clock, and agreement with the models that it extends."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_commopt.compression import BF16, Compression, Int8, PowerSGD, Uncompressed
from lightning_commopt.pipeline.named import ScheduleName, ideal_bubble, schedule_named
from lightning_commopt.pipeline.simulate import StageCost, simulate
from lightning_commopt.planning import simulate_step
from lightning_commopt.planning.events import Task, run
from lightning_commopt.planning.pipelined import add_copy
from lightning_commopt.planning.stepping import Step
from lightning_commopt.tuning import Channel, CodecCost, ComputeProfile, Link, Plan, predict

METHODS: list[Compression] = [Uncompressed(), BF16(), Int8(), PowerSGD(rank=4)]

channels = st.builds(
    Channel, bytes_per_second=st.floats(1e5, 1e11), latency_ms=st.floats(0, 5), stolen_ns_per_byte=st.floats(0, 20)
)
costs = st.builds(CodecCost, *[st.floats(0, 30)] * 3, bucket_us=st.floats(0, 500))
profiles = st.builds(ComputeProfile, *[st.floats(0.1, 1e3)] * 3, contention=st.sampled_from([0.0, 0.5, 1.0]))
sizes = st.lists(st.integers(1, 10**7), min_size=1, max_size=6)


@st.composite
def links(draw: st.DrawFn) -> Link:
    nodes, size = draw(st.integers(2, 8)), draw(st.sampled_from([1, 1, 4]))
    return Link(nodes * size, draw(channels), draw(channels), size, draw(channels) if size > 1 else None)


@settings(max_examples=60)
@given(profiles, links(), sizes, costs, st.sampled_from(METHODS), st.booleans(), st.data())
def test_equal_ranks_take_what_the_cost_model_says(
    profile: ComputeProfile,
    link: Link,
    numels: list[int],
    codec: CodecCost,
    method: Compression,
    overlapped: bool,
    data: st.DataObject,
) -> None:
    """To a billionth, also where several kinds of rank are simulated that do not differ."""
    plan = Plan(method, numels, codec, dense_buckets=data.draw(st.integers(0, 1)), overlapped=overlapped)
    told = predict(profile, link, plan).step_ms
    assert simulate_step(profile, link, plan) == pytest.approx(told, rel=1e-9)
    assert simulate_step(profile, link, plan, factors=(1.0, 1.0)) == pytest.approx(told, rel=1e-9)


@settings(max_examples=20)
@given(profiles, links(), sizes, st.floats(1.0, 3.0))
def test_a_slow_rank_delays_all_by_its_computing_at_most(
    profile: ComputeProfile, link: Link, numels: list[int], slow: float
) -> None:
    plan = Plan(Uncompressed(), numels)
    even, uneven = (simulate_step(profile, link, plan, factors) for factors in ((1.0,), (1.0, slow)))
    assert even * (1 - 1e-9) <= uneven <= even * slow * (1 + 1e-9)
    assert uneven >= slow * profile.step_ms * (1 - 1e-9)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize("transfer", [0.0, 0.3])
def test_a_pipeline_takes_what_its_own_simulation_says(name: ScheduleName, transfer: float) -> None:
    schedule = schedule_named(name, 4, 16)
    stages = [StageCost(1.0 + 0.1 * (stage % 3), 2.0, 1.0) for stage in range(schedule.stages)]
    step = Step()
    add_copy(step, schedule, stages, lambda source, target: ((), transfer, 0.0))
    assert run(step.tasks).end == pytest.approx(simulate(schedule, stages, transfer).step, rel=1e-9)


def test_four_stages_and_sixteen_microbatches_wait_for_three_nineteenths() -> None:
    """(p - 1) / (m + p - 1), Narayanan et al. (arXiv 2104.04473), section 2.2.1, as part of the whole step."""
    step, schedule = Step(), schedule_named("1f1b", 4, 16)
    add_copy(step, schedule, [StageCost(1.0, 2.0)] * 4, lambda source, target: ((), 0.0, 0.0))
    end = run(step.tasks).end
    assert 1 - 16 * 3 / end == pytest.approx(3 / 19) == ideal_bubble("1f1b", 4, 16)


LINKS: list[tuple[Sequence[Task], float]] = [
    ([Task(("a",), links=(("n", 4.0),)), Task(("b",), links=(("n", 4.0),))], 8.0),  # half of the link each
    ([Task(("a",), links=(("n", 4.0),)), Task(("b",), links=(("m", 4.0),))], 4.0),  # links of their own
    ([Task(("a",), links=(("n", 4.0),)), Task(("a",), links=(("n", 4.0),))], 8.0),  # one after the other
    ([Task(("a",), links=(("n", 2.0),)), Task(("b",), links=(("n", 4.0),))], 6.0),  # alone again after 4
    ([Task(("a",), work_ms=3, links=(("n", 2.0),)), Task(("b",), links=(("n", 4.0),))], 6.0),  # shares from 3 to 5
    ([Task(("a", "b"), work_ms=1), Task(("b",), work_ms=2), Task(("a",), work_ms=5)], 6.0),  # a rendezvous
    ([Task(("a",), work_ms=1, latency_ms=4), Task(("b",), (0,), 1), Task(("a",), work_ms=2)], 6.0),
]


@pytest.mark.parametrize(("tasks", "end"), LINKS)
def test_streams_are_in_order_and_links_are_shared(tasks: Sequence[Task], end: float) -> None:
    assert run(tasks).end == pytest.approx(end)


def test_waiting_in_a_circle_is_an_error() -> None:
    with pytest.raises(ValueError, match="`2` of `2` tasks wait for each other in a circle"):
        run([Task(("a",), (1,)), Task(("b",), (0,))])
