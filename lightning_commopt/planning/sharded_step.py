"""A step whose ranks share parameters block by block (FSDP2, ZeRO stage 3), as tasks."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_commopt.planning.stepping import Step, add_exchange
from lightning_commopt.tuning.bucket_cost import BucketCost

__all__ = ["Collective", "ShardedBlock", "add_sharded"]

_AHEAD = 2  # blocks that are gathered before they are needed


@dataclass(frozen=True)
class Collective:
    """What all ranks do at once.

    Args:
        link: By which.
        ms: For which it keeps the link busy.
        latency_ms: After which it is through.
        work_ms: Of the device, encoding and decoding.
        node_bytes: That a node sends to others.

    """

    link: str
    ms: float = 0.0
    latency_ms: float = 0.0
    work_ms: float = 0.0
    node_bytes: float = 0.0


@dataclass(frozen=True)
class ShardedBlock:
    """One block of the model, all of which are alike.

    Args:
        forward_ms: Of one pass.
        backward_ms: Of one pass.
        gather: Of its parameters, before forward.
        gather_again: Of its parameters, before backward.
        reduce: Of its gradients, after backward.
        exchange: Of its shard's gradients between replicas, in the last pass; None where there is one replica.
        exchange_link: By which.
        exchange_share: Bytes that a node sends to others for each byte that a rank sends in the exchange.

    """

    forward_ms: float
    backward_ms: float
    gather: Collective
    gather_again: Collective
    reduce: Collective
    exchange: BucketCost | None = None
    exchange_link: str = "network"
    exchange_share: float = 0.0


def add_sharded(
    step: Step, block: ShardedBlock, blocks: int, passes: int, optimizer_ms: float, factors: Sequence[float]
) -> None:
    """Add a step.

    Parameters are gathered at most two blocks ahead, on a stream of their own; gradients are reduced on another one.

    Args:
        step: Where to add it.
        block: Each block.
        blocks: Their number.
        passes: Batches of a step; replicas meet in the last.
        optimizer_ms: Of a rank.
        factors: How many times as long each kind of rank computes.

    """
    ranks = [f"rank {place}" for place in range(len(factors))]
    exchange_ms = 0.0 if block.exchange is None else block.exchange.codec_ms
    computed: list[list[int]] = []  # of all blocks so far, in the order of passing them
    ends: list[list[int]] = []
    for index in range(passes):
        for backward in (False, True):
            gather = block.gather_again if backward else block.gather
            for _ in range(blocks):
                allowed = computed[-_AHEAD] if len(computed) >= _AHEAD else []
                gathered = _add_collective(step, [f"{rank} gather" for rank in ranks], gather, allowed)
                work_ms = (block.backward_ms + block.reduce.work_ms) if backward else block.forward_ms
                work_ms += gather.work_ms  # codecs share the device with what computes
                if backward and index == passes - 1:
                    work_ms += exchange_ms
                computed.append(
                    [
                        step.add(rank, after=[gathered], work_ms=factor * work_ms)
                        for rank, factor in zip(ranks, factors, strict=True)
                    ]
                )
                if backward:
                    reduced = _add_collective(step, [f"{rank} reduce" for rank in ranks], block.reduce, computed[-1])
                    ends.append([reduced] * len(ranks))
                    if index == passes - 1 and block.exchange is not None:
                        ends += add_exchange(
                            step,
                            ranks,
                            [block.exchange],
                            [ends[-1]],
                            link=block.exchange_link,
                            node_share=block.exchange_share,
                            factors=factors,
                        )
    for place, (rank, factor) in enumerate(zip(ranks, factors, strict=True)):
        step.add(rank, after=[tasks[place] for tasks in ends], work_ms=factor * optimizer_ms)


def _add_collective(step: Step, streams: Sequence[str], collective: Collective, after: Sequence[int]) -> int:
    return step.add(
        *streams,
        after=after,
        work_ms=collective.work_ms,
        links=[(collective.link, collective.ms)],
        latency_ms=collective.latency_ms,
        node_bytes=collective.node_bytes,
    )
