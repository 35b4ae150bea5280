"""Everybody sends its encoded bucket to everybody."""

from collections.abc import Iterator

from typing_extensions import override

from lightning_commopt.measure import Traffic
from lightning_commopt.routes.route import Parcel, Route, merge

__all__ = ["OnePhase"]


class OnePhase(Route):
    """One all-gather of encoded buckets; every rank decodes all of them and adds in rank order.

    A rank sends ``(W - 1) b`` bytes against ``2 (W - 1) / W b`` of two hops: the same for two ranks, at half the
    latency and without a second quantisation.
    """

    @property
    @override
    def lanes(self) -> int:
        return 2

    @override
    def traffic(self, parcel: Parcel, round: int) -> Traffic:
        return self.format(parcel, round).traffic * (self.transport.world - 1)

    @override
    def exchange(self, parcel: Parcel, round: int) -> Iterator[None]:
        method, world = parcel.method, self.transport.world
        form = self.format(parcel, round)
        sent, got = self.messages(f"send {parcel.lane}", 1, form), self.messages(f"receive {parcel.lane}", world, form)
        here = self.context(parcel, 0, round, hop=1)

        with self.recorder.span("encode"):
            sent.flags[0].copy_(parcel.flags)
            sent.exact[0].copy_(parcel.exact)
            method.encode(parcel.values, sent.payloads[0], here)
        yield from self.travel(self.transport.all_gather, sent.rows[0], got.rows)
        with self.recorder.span("decode"):
            merge(form, got, parcel.flags_any, parcel.exact_mean)
            for rank, payload in enumerate(got.payloads):
                method.decode(payload, parcel.mean, here, add=rank > 0)
            parcel.mean.mul_(1 / world)
