"""When the last bucket of a step is through, given what each costs."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Leg", "last_end_ms", "last_end_overlapped_ms"]


@dataclass(frozen=True)
class Leg:
    """Work on a bucket, and the messages that leave after it, ms.

    Args:
        work_ms: Time of the thread or stream that exchanges.
        wire_ms: For which the messages keep the link busy.
        latency_ms: After which they are there.
        waited: Whether nothing else is done until they are there.
        sent_bytes: Of the messages, that a rank sends.

    """

    work_ms: float
    wire_ms: float = 0.0
    latency_ms: float = 0.0
    waited: bool = False
    sent_bytes: float = 0.0

    @property
    def total_ms(self) -> float:
        """All of it, one after the other."""
        return self.work_ms + self.wire_ms + self.latency_ms


def last_end_ms(ready: Sequence[float], buckets: Sequence[Sequence[Leg]]) -> float:
    """Return the end of the last bucket where one is carried after the other.

    Args:
        ready: When each bucket is ready.
        buckets: Their legs.

    """
    end = 0.0
    for ready_ms, legs in zip(ready, buckets, strict=True):
        end = max(end, ready_ms) + sum(leg.total_ms for leg in legs)
    return end


def last_end_overlapped_ms(ready: Sequence[float], buckets: Sequence[Sequence[Leg]]) -> float:
    """Return the same where buckets are worked on while messages of others travel, as on the CPU.

    A bucket that becomes ready is taken up to its first messages, then each before it up to its next ones, the newest
    first, as in :class:`~lightning_commopt.routes.stream.ThreadStream`. Messages share one link, in order.

    Args:
        ready: When each bucket is ready.
        buckets: Their legs.

    """
    work_end = wire_end = 0.0

    def advanced(under_way: list[tuple[float, Sequence[Leg]]]) -> list[tuple[float, Sequence[Leg]]]:
        nonlocal work_end, wire_end
        left = []
        for there_ms, legs in under_way:
            goes_on = True
            while legs and goes_on:
                leg, legs = legs[0], legs[1:]
                work_end = max(work_end, there_ms) + leg.work_ms
                wire_end = max(wire_end, work_end if leg.wire_ms else 0.0) + leg.wire_ms
                there_ms = (wire_end if leg.wire_ms else work_end) + leg.latency_ms
                goes_on = leg.waited
            if legs:
                left.append((there_ms, legs))
        return left

    under_way: list[tuple[float, Sequence[Leg]]] = []
    for ready_ms, legs in zip(ready, buckets, strict=True):
        under_way = advanced([(ready_ms, legs), *under_way])
    while under_way:
        under_way = advanced(under_way)
    return work_end
