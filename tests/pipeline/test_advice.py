"""Measured costs name the heavy stage and the better cut."""

import pytest

from lightning_commopt.pipeline import Action, Kind, Schedule, StageCost, one_f_one_b, schedule_named
from lightning_commopt.pipeline.advice import advise
from lightning_commopt.pipeline.bubble_report import bubble_report
from lightning_commopt.pipeline.measured import MeasuredStep, stage_costs, typical_step
from lightning_commopt.pipeline.timing import Timed, TimedStep

SCHEDULE = one_f_one_b(2, 8)


def cost(load: float) -> StageCost:
    return StageCost(load / 3, 2 * load / 3, load / 3)


def test_a_heavy_last_stage() -> None:
    """Four equal blocks and a head that was expected to cost one of them, but costs four."""
    advice = advise(SCHEDULE, [cost(0.002), cost(0.006)], (2,), [1, 1, 1 / 3, 1 / 3, 4 / 3])
    assert (advice.heaviest, advice.better) == (1, (4,))
    assert (advice.seconds, advice.mean) == pytest.approx((0.006, 0.004))
    assert advice.bubble == pytest.approx(1 - 8 * 8 / 2 / (8 * 6 + 2))
    assert advice.better_bubble == pytest.approx(1 / 9)
    assert advice.saved == pytest.approx(1 - 36 / 50)
    assert "Stage 1 is the heaviest with 6 ms a microbatch (mean 4 ms)" in str(advice)
    assert "`cuts=[4]` instead of [2] would shorten the step by 28%, to a bubble of 11.1%" in str(advice)


def test_even_stages_are_left_alone() -> None:
    advice = advise(SCHEDULE, [cost(4), cost(4.05)], (2,), [1, 1, 1, 1])
    assert advice.better is None
    assert "No other cuts would shorten the step by 2%" in str(advice)


def test_only_possible_places_are_named() -> None:
    costs = [cost(2), cost(9)]
    assert advise(SCHEDULE, costs, (1,), [1, 1, 1, 1]).better == (2,)
    assert advise(SCHEDULE, costs, (1,), [1, 1, 1, 1], places=(1, 3)).better == (3,)


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="`2` stages have `1` costs and `1` cuts"):
        advise(SCHEDULE, [cost(1)], (2,), [1, 1, 1])


def timeline(schedule: Schedule, rank: int, seconds: dict[Kind, float], wait: float) -> tuple[Timed, ...]:
    now, events = 0.0, []
    for action in schedule.actions[rank]:
        events.append(Timed(action, now, now + seconds[action.kind] * (1 + action.stage)))
        now = events[-1].end + wait
    return tuple(events)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_costs_of_stages(name: str) -> None:
    schedule = schedule_named(name, 2, 4)  # type: ignore[arg-type]
    seconds = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.5, Kind.BACKWARD_WEIGHT: 0.5}
    timelines = tuple(timeline(schedule, rank, seconds, wait=3.0) for rank in range(2))
    weight = 0.5 if name == "zbv" else 0.0
    expected = [StageCost(k, 2.0 * k, weight * k) for k in range(1, schedule.stages + 1)]
    assert stage_costs(timelines, schedule.stages) == expected
    measured = MeasuredStep(timelines, 100.0)
    busy = [sum(3.0 * 4 * (1 + stage) for stage in schedule.local_stages(rank)) for rank in range(2)]
    assert measured.bubbles == pytest.approx([1 - b / 100 for b in busy])
    assert measured.bubble == pytest.approx(1 - sum(busy) / 200)
    assert measured.simulated(schedule).busy == pytest.approx(busy)


def test_a_stage_without_times_is_refused() -> None:
    with pytest.raises(ValueError, match="No forward of stage `1` was timed"):
        stage_costs([[Timed(Action(Kind.FORWARD, 0, 0), 0.0, 1.0)]], 2)


def test_report() -> None:
    """Stage 1 takes twice as long as stage 0; messages and Python take a tenth of the step."""
    seconds = {Kind.FORWARD: 0.001, Kind.BACKWARD: 0.002}
    timelines = tuple(timeline(SCHEDULE, rank, seconds, wait=0.0) for rank in range(2))
    simulated = 0.001 + 8 * 0.006 + 0.002
    text = bubble_report("1f1b", SCHEDULE, MeasuredStep(timelines, simulated / 0.9), (2,), [1] * 6)
    assert "`1f1b` with 8 microbatches: 36.5% of a step of 56.7 ms (by rank: 57.6%, 15.3%)" in text
    assert "alone it would be 29.4%, with equal stages 11.1%" in text
    assert "Stage 1 is the heaviest with 6 ms a microbatch (mean 4.5 ms); bubble 29.4%. `cuts=[3]`" in text


def test_the_median_of_full_steps_is_typical() -> None:
    """A partial batch has fewer microbatches; a step lasts until its last rank has ended."""
    ranks = [[(8, 3.0), (2, 0.1), (8, 1.0), (8, 2.0)], [(8, 3.0), (2, 0.1), (8, 9.0), (8, 2.5)]]
    by_rank = [
        [TimedStep(m, (Timed(Action(Kind.FORWARD, rank, 0), 0.0, seconds),), seconds) for m, seconds in steps]
        for rank, steps in enumerate(ranks)
    ]
    found = typical_step(by_rank)
    assert found is not None
    assert (found[0], found[1].step) == (8, 3.0)
    assert [timeline[0].end for timeline in found[1].timelines] == [3.0, 3.0]
    assert typical_step([[], []]) is None
