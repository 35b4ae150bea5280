"""A step as tasks: what ranks compute, and how they exchange gradients beside it."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from lightning_commopt.compression import Uncompressed
from lightning_commopt.planning.events import Task, run
from lightning_commopt.tuning.bucket_cost import BucketCost, bucket_costs
from lightning_commopt.tuning.cost_model import ComputeProfile
from lightning_commopt.tuning.links import Link
from lightning_commopt.tuning.plan import Plan

__all__ = ["Step", "add_data_parallel", "add_exchange", "simulate_step"]

_NETWORK = "network"


class Step:
    """Tasks of a step, as they are added."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def add(
        self,
        *streams: str,
        after: Sequence[int] = (),
        work_ms: float = 0.0,
        links: Sequence[tuple[str, float]] = (),
        latency_ms: float = 0.0,
        node_bytes: float = 0.0,
    ) -> int:
        """Add a task; return its place."""
        self.tasks.append(Task(streams, tuple(after), work_ms, tuple(links), latency_ms, node_bytes))
        return len(self.tasks) - 1


def add_exchange(
    step: Step,
    group: Sequence[str],
    costs: Sequence[BucketCost],
    ready: Sequence[Sequence[int]],
    *,
    link: str = _NETWORK,
    node_share: float = 0.0,
    overlapped: bool = False,
    factors: Sequence[float] | None = None,
) -> list[list[int]]:
    """Add the exchange of some buckets among ranks.

    A message sets out when every rank of the group has done its part, and is a task of all of them.

    Args:
        step: Where to add it.
        group: Names of the ranks.
        costs: Of each bucket.
        ready: By bucket, the task of each rank after which its gradients are there.
        link: By which messages travel.
        node_share: Bytes that a node sends to others for each byte that a rank sends.
        overlapped: Whether buckets are worked on while messages of others travel.
        factors: How many times as long each rank works.

    Returns:
        By bucket, the task of each rank after which its mean is there.

    """
    factors = factors or [1.0] * len(group)
    wires = [f"{rank} wire" for rank in group]
    there = [list(tasks) for tasks in ready]
    free: list[int] | None = None  # where buckets follow one another, the end of the last
    for bucket, index in (_overlapped_order if overlapped else _order)(costs):
        leg = costs[bucket].legs[index]
        before = there[bucket] if overlapped or free is None else [*there[bucket], *free]
        alone_ms = 0.0 if leg.wire_ms else leg.latency_ms
        works = [
            step.add(
                f"{rank} exchange",
                after=[own, *before[len(group) :]],
                work_ms=factor * leg.work_ms,
                latency_ms=alone_ms,
            )
            for rank, own, factor in zip(group, before, factors, strict=False)
        ]
        there[bucket] = works
        if leg.wire_ms:
            message = step.add(
                *wires,
                after=works,
                links=[(link, leg.wire_ms)],
                latency_ms=leg.latency_ms,
                node_bytes=node_share * leg.sent_bytes,
            )
            there[bucket] = [message] * len(group)
        if index == len(costs[bucket].legs) - 1:
            free = there[bucket]
    return there


def _order(costs: Sequence[BucketCost]) -> Iterator[tuple[int, int]]:
    """Yield bucket and leg where one bucket is carried after the other."""
    for bucket, cost in enumerate(costs):
        yield from ((bucket, index) for index in range(len(cost.legs)))


def _overlapped_order(costs: Sequence[BucketCost]) -> Iterator[tuple[int, int]]:
    """Yield the same as :func:`~lightning_commopt.tuning.timeline.last_end_overlapped_ms` takes them up."""
    under_way: list[tuple[int, int]] = []
    for bucket in [*range(len(costs)), None]:
        fresh = [] if bucket is None else [(bucket, 0)]
        while True:
            left = []
            for place, index in [*fresh, *under_way]:
                goes_on, legs = True, costs[place].legs
                while goes_on and index < len(legs):
                    yield place, index
                    goes_on = legs[index].waited
                    index += 1
                if index < len(legs):
                    left.append((place, index))
            under_way, fresh = left, []
            if bucket is not None or not under_way:
                break


def simulate_step(profile: ComputeProfile, link: Link, plan: Plan, factors: Sequence[float] = (1.0,)) -> float:
    """Return what a step of data parallel training takes, ms.

    The same as :func:`~lightning_commopt.tuning.predict` says where all ranks are alike, which is tested.

    Args:
        profile: Forward and backward of one pass, without exchange.
        link: The network.
        plan: How gradients are exchanged.
        factors: How many times as long each kind of rank computes; ranks of one kind do the same at the same time.

    """
    step = Step()
    add_data_parallel(step, profile, bucket_costs(link, plan), plan, factors=factors)
    return run(step.tasks).end


def add_data_parallel(
    step: Step,
    profile: ComputeProfile,
    costs: Sequence[BucketCost],
    plan: Plan,
    *,
    passes: int = 1,
    factors: Sequence[float] = (1.0,),
    link: str = _NETWORK,
    node_share: float = 0.0,
) -> list[int]:
    """Add a step of data parallel training; return the last task of each rank.

    Args:
        step: Where to add it.
        profile: Forward and backward of one pass, and the optimizer, without exchange.
        costs: Of the plan's buckets.
        plan: How gradients are exchanged.
        passes: Batches of a step; gradients are exchanged in the last.
        factors: As in :func:`simulate_step`.
        link: By which messages travel.
        node_share: As in :func:`add_exchange`.

    """
    ranks = [f"rank {place}" for place in range(len(factors))]
    taken = [profile.contention * cost.codec_ms + cost.stolen_ms for cost in costs]
    ready = [
        _add_computing(step, rank, profile, plan.bucket_numels, taken, passes, factor)
        for rank, factor in zip(ranks, factors, strict=True)
    ]
    overlaps = plan.overlapped and not isinstance(plan.method, Uncompressed)
    by_bucket = list(zip(*(tasks[:-1] for tasks in ready), strict=True))
    there = add_exchange(
        step, ranks, costs, by_bucket, link=link, node_share=node_share, overlapped=overlaps, factors=factors
    )
    return [
        step.add(
            rank, after=[ready[place][-1], *(tasks[place] for tasks in there)], work_ms=factor * profile.optimizer_ms
        )
        for place, (rank, factor) in enumerate(zip(ranks, factors, strict=True))
    ]


def _add_computing(
    step: Step,
    rank: str,
    profile: ComputeProfile,
    numels: Sequence[int],
    taken: Sequence[float],
    passes: int,
    factor: float,
) -> list[int]:
    """Add forward and backward; return the task after which each bucket is there, and the last of all."""
    before_ms = (passes - 1) * (profile.forward_ms + profile.backward_ms) + profile.forward_ms
    step.add(rank, work_ms=factor * before_ms)
    ready, at_ms, total = [], 0.0, sum(numels)
    for there, taken_ms in zip(accumulate(numels), taken, strict=True):
        ready_ms = profile.ready_ms(there, total)
        ready.append(step.add(rank, work_ms=factor * max(0.0, ready_ms - at_ms)))
        at_ms = max(at_ms, ready_ms)
        step.add(rank, work_ms=factor * taken_ms)
    return [*ready, step.add(rank, work_ms=factor * (profile.backward_ms - at_ms))]
