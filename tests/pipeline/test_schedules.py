"""What must hold of every schedule."""

import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_commopt.pipeline import Action, Kind, Schedule, gpipe, one_f_one_b, schedule_named, zero_bubble_v
from tests.pipeline.families import schedules

pytestmark = pytest.mark.runs("commopt_pipeline", "schedules")


def most_in_flight(actions: tuple[Action, ...]) -> int:
    held = most = 0
    for action in actions:
        held += (action.kind is Kind.FORWARD) - (action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT))
        most = max(most, held)
    return most


@given(schedules())
def test_every_microbatch_passes_every_stage_once(schedule: Schedule) -> None:
    done = Counter(action for actions in schedule.actions for action in actions)
    assert set(done.values()) == {1}
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            kinds = {kind for kind in Kind if Action(kind, stage, microbatch) in done}
            assert kinds in (
                {Kind.FORWARD, Kind.BACKWARD},
                {Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT},
            )
    assert sum(done.values()) == sum(map(len, schedule.actions))


@given(schedules())
def test_a_rank_computes_its_own_stages_in_order(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.actions):
        assert {action.stage for action in actions} == set(schedule.local_stages(rank))
        place = {action: index for index, action in enumerate(actions)}
        for action in actions:
            forward = place[Action(Kind.FORWARD, action.stage, action.microbatch)]
            assert action.kind is Kind.FORWARD or forward < place[action]
            if action.kind is Kind.BACKWARD_WEIGHT:
                assert place[Action(Kind.BACKWARD_INPUT, action.stage, action.microbatch)] < place[action]


@given(st.integers(1, 6), st.integers(1, 12))
def test_memory_of_one_f_one_b(stages: int, microbatches: int) -> None:
    for stage, actions in enumerate(one_f_one_b(stages, microbatches).actions):
        assert most_in_flight(actions) == min(microbatches, stages - stage)
    assert {most_in_flight(actions) for actions in gpipe(stages, microbatches).actions} == {microbatches}


@given(st.integers(1, 6), st.integers(1, 12))
def test_memory_of_zero_bubble_v(ranks: int, microbatches: int) -> None:
    for actions in zero_bubble_v(ranks, microbatches).actions:
        assert most_in_flight(actions) <= 2 * min(ranks, microbatches)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b", 0, 4), "`stages=0` must be at least 1"),
        (("zbv", 2, 0), "`microbatches=0` must be at least 1"),
        (("2f2b", 2, 4), "`schedule='2f2b'` must be one of 'gpipe', '1f1b', 'interleaved', 'zbv'"),
        (("1f1b", 2, 4, 2), "`stages_per_rank=2`: `1f1b` has 1; only `interleaved` takes"),
        (("zbv", 2, 4, 3), "`stages_per_rank=3`: `zbv` has 2"),
        (("interleaved", 2, 4, 1), "`stages_per_rank=1`: `interleaved` needs at least 2; `1f1b` has 1"),
    ],
)
def test_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        schedule_named(*arguments)
