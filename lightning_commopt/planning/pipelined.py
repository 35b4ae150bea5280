"""A step of a pipeline, times tensor and data parallel, as tasks."""

from collections.abc import Callable, Sequence

from lightning_commopt.pipeline.actions import Action, Schedule
from lightning_commopt.pipeline.messages import Message, incoming, outgoing
from lightning_commopt.pipeline.simulate import StageCost
from lightning_commopt.planning.stepping import Step, add_exchange
from lightning_commopt.tuning.bucket_cost import BucketCost

__all__ = ["Travel", "add_copy", "add_pipelined"]

Travel = Callable[[int, int], tuple[tuple[tuple[str, float], ...], float, float]]
"""Tells, of a message from one rank of a pipeline to another, what it takes of which links, its latency in ms, and the
bytes that its node sends to others."""


def add_copy(
    step: Step,
    schedule: Schedule,
    costs: Sequence[StageCost],
    travel: Travel,
    *,
    name: str = "stage",
    factors: Sequence[float] | None = None,
) -> list[int]:
    """Add one pass of a pipeline's schedule; return the last task of each of its ranks.

    Without links it takes what :func:`lightning_commopt.pipeline.simulate.simulate` says, which is tested.

    Args:
        step: Where to add it.
        schedule: What each rank computes.
        costs: Of each stage, for one microbatch, ms.
        travel: What messages take.
        name: What the streams of its ranks begin with.
        factors: How many times as long each rank computes.

    """
    stages, first = schedule.stages, len(step.tasks)
    actions = [(rank, action) for rank, own in enumerate(schedule.actions) for action in own]
    made: dict[Message, Action] = {}
    for _, action in actions:
        message = outgoing(action, stages)
        if message is not None:
            made[message] = action
    places = {action: first + place for place, (_, action) in enumerate(actions)}
    sent = [m for m in made if schedule.placement[m.source] != schedule.placement[m.target]]
    arrivals = {message: first + len(actions) + place for place, message in enumerate(sent)}
    last = [0] * schedule.ranks
    for rank, action in actions:
        message = incoming(action, stages)
        after = [] if message is None else [arrivals.get(message, places[made[message]])]
        factor = factors[rank] if factors else 1.0
        last[rank] = step.add(f"{name} {rank}", after=after, work_ms=factor * costs[action.stage].of(action.kind))
    for message in sent:
        links, latency_ms, node_bytes = travel(schedule.placement[message.source], schedule.placement[message.target])
        step.add(after=[places[made[message]]], links=links, latency_ms=latency_ms, node_bytes=node_bytes)
    return last


def add_pipelined(
    step: Step,
    schedule: Schedule,
    costs: Sequence[StageCost],
    travels: Sequence[Travel],
    exchange: Sequence[Sequence[BucketCost]],
    exchange_links: Sequence[str],
    exchange_share: float,
    optimizer_ms: Sequence[float],
    factors: Sequence[Sequence[float]],
) -> None:
    """Add a whole step: every kind of copy, then of each stage the exchange among copies, then the optimizer.

    A pipeline hands its gradients to the exchange when its schedule is over; a stage that is through sooner begins
    sooner.

    Args:
        step: Where to add it.
        schedule: What each rank of a copy computes.
        costs: Of each stage, for one microbatch, ms.
        travels: By kind of copy, what its messages take.
        exchange: By rank of a copy, the buckets that it exchanges with its replicas; none where there is one copy.
        exchange_links: By rank of a copy, the link of that.
        exchange_share: Bytes that a node sends to others for each byte that a rank sends in it.
        optimizer_ms: By rank of a copy.
        factors: By kind of copy, how many times as long each of its ranks computes.

    """
    copies = range(len(factors))
    names = [f"copy {copy} stage" for copy in copies]
    last = [add_copy(step, schedule, costs, travels[copy], name=names[copy], factors=factors[copy]) for copy in copies]
    for rank in range(schedule.ranks):
        group, slow = [f"{name} {rank}" for name in names], [factors[copy][rank] for copy in copies]
        begun = [last[copy][rank] for copy in copies]
        there = add_exchange(
            step,
            group,
            exchange[rank],
            [begun] * len(exchange[rank]),
            link=exchange_links[rank],
            node_share=exchange_share,
            factors=slow,
        )
        for copy in copies:
            after = [begun[copy], *(tasks[copy] for tasks in there)]
            step.add(group[copy], after=after, work_ms=slow[copy] * optimizer_ms[rank])
