"""The simulator agrees with theory, and with what can be counted by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_commopt.pipeline import (
    Action,
    Kind,
    Schedule,
    ScheduleName,
    StageCost,
    gpipe,
    ideal_bubble,
    one_f_one_b,
    peak_activations,
    schedule_named,
    simulate,
)
from tests.pipeline.families import schedules

EQUAL = StageCost(forward=1, backward=2, weight=1)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("more", [0, 1, 3, 8])
def test_balanced_stages_reach_the_ideal(name: ScheduleName, ranks: int, more: int) -> None:
    microbatches = {"interleaved": ranks, "zbv": 2 * ranks - 1}.get(name, 1) + more
    schedule = schedule_named(name, ranks, microbatches)
    result = simulate(schedule, [EQUAL] * schedule.stages)
    assert result.bubbles == pytest.approx([ideal_bubble(name, ranks, microbatches)] * ranks, abs=1e-12)
    assert result.step * (1 - result.bubble) == pytest.approx(3 * microbatches * schedule.stages / ranks)


@pytest.mark.parametrize(
    ("name", "ideal"), [("gpipe", 3 / 19), ("1f1b", 3 / 19), ("interleaved", 3 / 35), ("zbv", 3 / 99)]
)
def test_ideal(name: ScheduleName, ideal: float) -> None:
    assert ideal_bubble(name, 4, 16) == ideal


@given(schedules())
def test_ideal_is_a_lower_bound(schedule: Schedule) -> None:
    busy = 3 * schedule.microbatches * schedule.stages // schedule.ranks
    assert simulate(schedule, [EQUAL] * schedule.stages).step >= busy + schedule.ranks - 1


def test_two_stages_by_hand() -> None:
    """F0.0 is over at 2, F1.0 at 3 + 1, B1.0 at 7, B0.0 starts one transfer later."""
    result = simulate(one_f_one_b(2, 1), [StageCost(2, 4), StageCost(1, 3)], transfer=1)
    assert result.starts == {
        Action(Kind.FORWARD, 0, 0): 0,
        Action(Kind.FORWARD, 1, 0): 3,
        Action(Kind.BACKWARD, 1, 0): 4,
        Action(Kind.BACKWARD, 0, 0): 8,
    }
    assert (result.step, result.busy) == (12, (6, 4))
    assert result.bubbles == pytest.approx((1 / 2, 2 / 3))


@given(st.integers(1, 6), st.integers(1, 12))
def test_peak_activations(stages: int, microbatches: int) -> None:
    sizes = [10 + stage for stage in range(stages)]
    assert peak_activations(gpipe(stages, microbatches), sizes) == tuple(microbatches * size for size in sizes)
    assert peak_activations(one_f_one_b(stages, microbatches)) == tuple(
        min(microbatches, stages - stage) for stage in range(stages)
    )


def test_a_circle_is_refused() -> None:
    forward, backward = Action(Kind.FORWARD, 1, 0), Action(Kind.BACKWARD, 0, 0)
    circle = Schedule((0, 1), ((backward, Action(Kind.FORWARD, 0, 0)), (forward, Action(Kind.BACKWARD, 1, 0))))
    with pytest.raises(ValueError, match=r"in a circle; next would be `\{0: 'B0.0', 1: 'F1.0'\}`"):
        simulate(circle, [EQUAL] * 2)


def test_wrong_costs_are_refused() -> None:
    with pytest.raises(ValueError, match="`1` costs were given for `2` stages"):
        simulate(gpipe(2, 2), [EQUAL])
    with pytest.raises(ValueError, match="`weight` is a part of `backward`"):
        StageCost(1, 1, 2)
