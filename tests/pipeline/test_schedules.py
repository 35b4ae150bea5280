"""What must hold of every schedule."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_commopt.pipeline import Action, Kind, Schedule, gpipe, one_f_one_b
from tests.pipeline.families import schedules


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


@pytest.mark.parametrize("sizes", [(0, 4), (2, 0)])
def test_sizes_below_one_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        gpipe(*sizes)
