"""Reduce-scatter and all-gather of encoded chunks."""

from collections.abc import Iterator

from typing_extensions import override

from lightning_commopt.measure import Traffic
from lightning_commopt.routes.route import Parcel, Route, add_residual, merge

__all__ = ["TwoHop"]


class TwoHop(Route):
    """Rank ``r`` owns chunk ``r``: it receives everybody's, adds them in fp32 in rank order, and sends the mean back.

    Both hops are encoded, each with a residual: a rank's own for what it sends, the owner's for the mean of its chunk.
    A rank sends ``2 (W - 1) / W`` of an encoded bucket. While a bucket is on its second hop, the next one is on its
    first: that one is always issued before, so that the order is the same on every rank.
    """

    second_hop = True

    @property
    @override
    def lanes(self) -> int:
        return 3

    @override
    def traffic(self, parcel: Parcel, round: int) -> Traffic:
        return self.format(parcel, round).traffic * (2 * (self.transport.world - 1))

    @override
    def exchange(self, parcel: Parcel, round: int) -> Iterator[None]:
        method, world, rank = parcel.method, self.transport.world, self.transport.rank
        form = self.format(parcel, round)
        sent, got = (self.messages(f"{name} {parcel.lane}", world, form) for name in ("send", "receive"))
        chunks, means = parcel.values.view(world, -1), parcel.mean.view(world, -1)
        chunk = chunks.shape[1]
        mine = self.context(parcel, rank * chunk, round, hop=2)
        exact_mean = self.scratch.get("exact_mean of a chunk", (form.exact,), parcel.exact_mean.dtype)

        with self.recorder.span("encode"):
            sent.flags.copy_(parcel.flags)
            sent.exact.copy_(parcel.exact.view(world, -1))
            for owner in range(world):
                here = self.context(parcel, owner * chunk, round, hop=1)
                method.encode(chunks[owner], sent.payloads[owner], here)
        yield from self.travel(self.transport.all_to_all, sent.rows, got.rows)
        with self.recorder.span("decode"):
            merge(form, got, parcel.flags_any, exact_mean)
            for source in range(world):
                method.decode(got.payloads[source], means[rank], mine, add=source > 0)
        with self.recorder.span("encode"):
            mean = add_residual(means[rank].mul_(1 / world), parcel.second)
            sent.flags[0].copy_(parcel.flags_any)
            sent.exact[0].copy_(exact_mean)
            method.encode(mean, sent.payloads[0], mine)
        yield from self.travel(self.transport.all_gather, sent.rows[0], got.rows)
        with self.recorder.span("decode"):
            parcel.exact_mean.view(world, -1).copy_(got.exact)
            for owner in range(world):
                method.decode(got.payloads[owner], means[owner], self.context(parcel, owner * chunk, round, hop=2))
