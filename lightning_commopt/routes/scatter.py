"""Reduce-scatter of encoded gradients: every rank ends with the mean of its own row."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from typing_extensions import override

from lightning_commopt.compression import BucketLayout, Parameter, Segment
from lightning_commopt.compression.layout import round_up
from lightning_commopt.measure import Traffic
from lightning_commopt.routes.route import Parcel, Route, merge

__all__ = ["Rows", "Scatter", "ScatterLayout"]


class Rows(NamedTuple):
    """A parameter that is cut into one part for each rank, and the elements of a part; the last ones may have less."""

    parameter: Parameter
    part: int


class ScatterLayout(BucketLayout):
    """A buffer with a row for each rank, which owns it: of every parameter one part.

    What fills the places of shorter parts in the buffer does not travel. Parts are described as parameters of their
    own, with the elements that they have of it in their name.

    Args:
        rows: The parameters, in the order of the buffer.
        alignment: Elements in a block of the method in force.
        owners: Number of ranks.

    """

    def __init__(self, rows: Sequence[Rows], alignment: int, owners: int) -> None:
        super().__init__([], alignment, owners)
        places = [part if p.exact else round_up(part, alignment) for p, part in rows]
        self.chunk = sum(place for place, (p, _) in zip(places, rows, strict=True) if not p.exact)
        self.exact_chunk = sum(place for place, (p, _) in zip(places, rows, strict=True) if p.exact)
        self.row_numel = sum(part for _, part in rows)
        self.numel = self.row_numel * owners
        self.origins: dict[str, tuple[str, int]] = {}
        """By the name of a part: the parameter's, and the first of its elements."""
        segments: list[Segment] = []
        self._row_starts = []
        for owner in range(owners):
            self._row_starts.append(len(segments))
            at, taken = owner * self.row_numel, {False: owner * self.chunk, True: owner * self.exact_chunk}
            for (parameter, part), place in zip(rows, places, strict=True):
                start, stop = min(owner * part, parameter.numel), min((owner + 1) * part, parameter.numel)
                if start < stop:
                    described = _part(parameter, start, stop)
                    self.origins[described.name] = parameter.name, start
                    segments.append(Segment(described, len(segments), at, taken[parameter.exact]))
                at += part
                taken[parameter.exact] += place
        self.segments = tuple(segments)
        self.compressed = tuple(s for s in segments if not s.parameter.exact)
        self.exact = tuple(s for s in segments if s.parameter.exact)

    def row(self, owner: int) -> tuple[Segment, ...]:
        """Return the segments that a rank owns."""
        ends = [*self._row_starts[1:], len(self.segments)]
        return self.segments[self._row_starts[owner] : ends[owner]]


def _part(parameter: Parameter, start: int, stop: int) -> Parameter:
    """Describe a stretch of a parameter's flattened elements; it travels as the whole parameter does."""
    if (start, stop) == (0, parameter.numel):
        return parameter
    return Parameter(f"{parameter.name}[{start}:{stop}]", (stop - start,), parameter.exact)


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
