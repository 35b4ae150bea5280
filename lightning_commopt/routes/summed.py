"""One all-reduce of payloads that may be added on the wire."""

from collections.abc import Iterator

import torch
from typing_extensions import override

from lightning_commopt.measure import Traffic
from lightning_commopt.routes.message import NONFINITE, PRESENT, TERMINATE
from lightning_commopt.routes.route import Parcel, Route

__all__ = ["Summed"]


class Summed(Route):
    """A plain all-reduce: the collective library adds, in the order of its ring.

    Flags travel as two counts a parameter, and one of the ranks that were asked to end, in front of the exact gradients
    and the payload.
    """

    @override
    def traffic(self, parcel: Parcel, round: int) -> Traffic:
        ring, wide = self.transport.ring_bytes, parcel.exact_mean.dtype
        flags, exact = _counts(parcel), len(parcel.exact)
        payload = self._payload_bytes(parcel, round)
        if parcel.method.wire_dtype == wide:
            total = ring((flags + exact) * wide.itemsize + payload)
        else:
            total = ring((flags + exact) * wide.itemsize) + ring(payload)
        return Traffic(ring(payload), ring(exact * wide.itemsize), total - ring(payload) - ring(exact * wide.itemsize))

    @override
    def exchange(self, parcel: Parcel, round: int) -> Iterator[None]:
        method, world, wide = parcel.method, self.transport.world, parcel.exact_mean.dtype
        count, counts = len(parcel.flags), _counts(parcel)
        exact_end = counts + len(parcel.exact)
        payload_numel = self._payload_bytes(parcel, round) // method.wire_dtype.itemsize
        together = method.wire_dtype == wide
        front = self.scratch.get("front", (exact_end + payload_numel * together,), wide)
        payload = front[exact_end:] if together else self.scratch.get("back", (payload_numel,), method.wire_dtype)
        here = self.context(parcel, 0, round, hop=1)

        with self.recorder.span("encode"):
            torch.bitwise_and(parcel.flags, PRESENT, out=front[:count])
            torch.bitwise_and(parcel.flags, NONFINITE, out=front[count : 2 * count])
            torch.bitwise_and(parcel.flags[:1], TERMINATE, out=front[2 * count : counts])
            front[counts:exact_end].copy_(parcel.exact)
            method.encode(parcel.values, payload, here)
        with self.recorder.span("collective"):
            self.transport.all_reduce(front)
            if not together:
                self.transport.all_reduce(payload)
        with self.recorder.span("decode"):
            present, nonfinite = front[:count] > 0, front[count : 2 * count] > 0
            parcel.flags_any.copy_(present * PRESENT + nonfinite * NONFINITE)
            parcel.flags_any[:1] += (front[2 * count : counts] > 0) * TERMINATE
            torch.mul(front[counts:exact_end], 1 / world, out=parcel.exact_mean)
            method.decode(payload, parcel.mean, here)
            parcel.mean.mul_(1 / world)
        return
        yield  # it is through at once

    def _payload_bytes(self, parcel: Parcel, round: int) -> int:
        return parcel.method.payload_bytes(len(parcel.values), self.context(parcel, 0, round, hop=1))


def _counts(parcel: Parcel) -> int:
    return 2 * len(parcel.flags) + 1
