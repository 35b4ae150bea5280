"""Reduce-scatter of encoded gradients, as ZeRO stage 3 needs it."""

from collections.abc import Iterator, Sequence

from typing_extensions import override

from lightning_commopt.compression import BucketLayout, Compression, Segment
from lightning_commopt.compression.layout import round_up
from lightning_commopt.measure import Traffic
from lightning_commopt.routes.route import Parcel, Route, merge
from lightning_commopt.zero.held import Held

__all__ = ["Scatter", "ScatterLayout"]


class ScatterLayout(BucketLayout):
    """A buffer with a row for each rank, which owns it: of every parameter one part of ``ceil(numel / owners)``.

    The last parts are shorter; what fills their place in the buffer is undefined, and does not travel.

    Args:
        held: The parameters, in the order of the buffer.
        method: The method in force.
        owners: Number of ranks.

    """

    def __init__(self, held: Sequence[Held], method: Compression, owners: int) -> None:
        super().__init__([], method.alignment, owners)
        parts = [-(-one.numel // owners) for one in held]
        exact = [method.travels_exactly(one.shape) for one in held]
        places = [part if e else round_up(part, method.alignment) for part, e in zip(parts, exact, strict=True)]
        self.chunk = sum(place for place, e in zip(places, exact, strict=True) if not e)
        self.exact_chunk = sum(place for place, e in zip(places, exact, strict=True) if e)
        self.row_numel = sum(parts)
        self.numel = self.row_numel * owners
        segments: list[Segment] = []
        self._row_starts = []
        for owner in range(owners):
            self._row_starts.append(len(segments))
            at, taken = owner * self.row_numel, {False: owner * self.chunk, True: owner * self.exact_chunk}
            for one, part, e, place in zip(held, parts, exact, places, strict=True):
                start, stop = min(owner * part, one.numel), min((owner + 1) * part, one.numel)
                if start < stop:
                    segments.append(Segment(one.part(start, stop, method), len(segments), at, taken[e]))
                at += part
                taken[e] += place
        self.segments = tuple(segments)
        self.compressed = tuple(s for s in segments if not s.parameter.exact)
        self.exact = tuple(s for s in segments if s.parameter.exact)

    def row(self, owner: int) -> tuple[Segment, ...]:
        """Return the segments that a rank owns."""
        ends = [*self._row_starts[1:], len(self.segments)]
        return self.segments[self._row_starts[owner] : ends[owner]]


class Scatter(Route):
    """Rank ``r`` owns chunk ``r``: it receives everybody's and adds them in fp32 in rank order. There is no second hop.

    A rank sends ``(W - 1) / W`` of an encoded bucket. ``mean`` and ``exact_mean`` of the parcel are those of the chunk.
    """

    @property
    @override
    def owners(self) -> int:
        return self.transport.world

    @override
    def traffic(self, parcel: Parcel, round: int) -> Traffic:
        return self.format(parcel, round).traffic * (self.transport.world - 1)

    @override
    def exchange(self, parcel: Parcel, round: int) -> Iterator[None]:
        method, world, rank = parcel.method, self.transport.world, self.transport.rank
        form = self.format(parcel, round)
        sent, got = self.messages("send", world, form), self.messages("receive", world, form)
        chunks = parcel.values.view(world, -1)
        chunk = chunks.shape[1]
        mine = self.context(parcel, rank * chunk, round, hop=1)
        with self.recorder.span("encode"):
            sent.flags.copy_(parcel.flags)
            sent.exact.copy_(parcel.exact.view(world, -1))
            for owner in range(world):
                method.encode(chunks[owner], sent.payloads[owner], self.context(parcel, owner * chunk, round, hop=1))
        yield from self.travel(self.transport.all_to_all, sent.rows, got.rows)
        with self.recorder.span("decode"):
            merge(form, got, parcel.flags_any, parcel.exact_mean)
            for source in range(world):
                method.decode(got.payloads[source], parcel.mean, mine, add=source > 0)
            parcel.mean.mul_(1 / world)
