"""Point-to-point operations: what is needed travels once, early, and never in a circle."""

from collections import Counter

import pytest
from hypothesis import given

from lightning_commopt.pipeline import (
    Action,
    DeadlockError,
    Kind,
    Message,
    Operation,
    Receive,
    Schedule,
    ScheduleName,
    Send,
    check_rendezvous,
    lower,
    one_f_one_b,
)
from lightning_commopt.pipeline.messages import incoming, outgoing
from tests.pipeline.families import FAMILIES, every_size, schedules


@pytest.mark.parametrize(("name", "per_rank"), FAMILIES)
def test_blocking_operations_finish(name: ScheduleName, per_rank: int | None) -> None:
    for schedule in every_size(name, per_rank):
        check_rendezvous(schedule.placement, lower(schedule))


@given(schedules())
def test_the_actions_are_those_of_the_schedule(schedule: Schedule) -> None:
    operations = lower(schedule)
    check_rendezvous(schedule.placement, operations)
    for actions, full in zip(schedule.actions, operations, strict=True):
        assert tuple(operation for operation in full if isinstance(operation, Action)) == actions


@given(schedules())
def test_each_message_travels_once_between_ranks(schedule: Schedule) -> None:
    operations = lower(schedule)
    needed = Counter(
        message
        for rank, actions in enumerate(schedule.actions)
        for action in actions
        if (message := incoming(action, schedule.stages)) and schedule.placement[message.source] != rank
    )
    for side in (Send, Receive):
        assert Counter(op.message for full in operations for op in full if isinstance(op, side)) == needed


@given(schedules())
def test_a_send_follows_its_action(schedule: Schedule) -> None:
    for full in lower(schedule):
        last: Action | None = None
        for operation in full:
            if isinstance(operation, Action):
                last = operation
            elif isinstance(operation, Send):
                assert last is not None
                assert (last.stage, last.microbatch) == (operation.message.source, operation.message.microbatch)


def actions_ahead(full: tuple[Operation, ...], stages: int) -> list[int]:
    """How many actions pass between each receive and the action that needs it."""
    actions = [operation for operation in full if isinstance(operation, Action)]
    needs = {incoming(action, stages): place for place, action in enumerate(actions)}
    places, done = [], 0
    for operation in full:
        done += isinstance(operation, Action)
        if isinstance(operation, Receive):
            places.append(needs[operation.message] - done)
    return places


@pytest.mark.parametrize("stages", [2, 4, 6])
def test_every_second_receive_of_1f1b_is_one_action_ahead(stages: int) -> None:
    """Of an activation and a gradient that meet, one is ahead; if both were, blocking operations would not finish."""
    microbatches = 12
    ahead = Counter(n for full in lower(one_f_one_b(stages, microbatches)) for n in actions_ahead(full, stages))
    assert set(ahead) == {0, 1}
    assert ahead[1] >= (stages - 1) * microbatches


def ahead_of_every_action(schedule: Schedule, rank: int) -> tuple[Operation, ...]:
    """What each action makes is sent at once, and what it needs is received before the action that precedes it."""
    actions = schedule.actions[rank]
    operations: list[Operation] = []
    for place, action in enumerate(actions):
        for needed in actions[place : place + 2] if place == 0 else actions[place + 1 : place + 2]:
            if message := incoming(needed, schedule.stages):
                operations.append(Receive(message, schedule.placement[message.source]))
        operations.append(action)
        if message := outgoing(action, schedule.stages):
            operations.append(Send(message, schedule.placement[message.target]))
    return tuple(operations)


@pytest.mark.parametrize("stages", [2, 4])
def test_all_receives_of_1f1b_ahead_would_deadlock(stages: int) -> None:
    schedule = one_f_one_b(stages, 8)
    operations = [ahead_of_every_action(schedule, rank) for rank in range(stages)]
    with pytest.raises(DeadlockError, match="No rank can go on"):
        check_rendezvous(schedule.placement, operations)


ACTIVATION, GRADIENT = Message(0, 1, 0), Message(1, 0, 0)
F0, F1, B1, B0 = (
    Action(k, s, 0) for k, s in ((Kind.FORWARD, 0), (Kind.FORWARD, 1), (Kind.BACKWARD, 1), (Kind.BACKWARD, 0))
)
FIRST = (F0, Send(ACTIVATION, 1), Receive(GRADIENT, 1), B0)
LAST = (Receive(ACTIVATION, 0), F1, B1, Send(GRADIENT, 0))


@pytest.mark.parametrize(
    ("first", "last", "message"),
    [
        (
            (*FIRST[2:], *FIRST[:2]),
            LAST,
            r"No rank can go on: rank 0 at the receive of gradient 0 .* from rank 1; rank 1",
        ),
        (FIRST, LAST[:3], "No rank can go on: rank 0 at the receive of gradient 0"),
        (FIRST, LAST[1:], "Rank 1 computes `F1.0` before it has activation 0"),
        ((*FIRST[1:], F0), LAST, "Rank 0 sends activation 0 .* before it was made"),
        (FIRST, (Receive(Message(0, 1, 1), 0), *LAST[1:]), "Rank 1 receives activation 1 .* where rank 0 sends"),
        (FIRST, (*LAST, F0), "Rank 1 computes `F0.0` of a stage on rank 0"),
    ],
)
def test_wrong_lists_are_noticed(first: tuple[Operation, ...], last: tuple[Operation, ...], message: str) -> None:
    check_rendezvous((0, 1), (FIRST, LAST))
    with pytest.raises(DeadlockError, match=message):
        check_rendezvous((0, 1), (first, last))
